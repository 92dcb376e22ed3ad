"""The protocol of a request's event log, as pure state machines without clock or I/O.

A request's log is its reply queue. Workers append events. Whether an event is accepted depends only
on the order of the log, so every reader that starts at the beginning sees the same stream:

* Each `Started` opens an attempt; attempt 1 belongs to the job's first delivery. A `Started` with
  the current ticket is a repetition. A run that another run replaces counts as crashed, unless the
  log contains its `HandedOver`, which may be late, or the broker disconnected it together with
  the log's reader. The ticket is the run's fencing token.
* A `Started` of an older delivery than the newest delivery seen opens no attempt: its worker lost
  the job while disconnected from the broker, and is cancelled. A run in quarantine counts as newer
  than a run of the same delivery outside it.
* A second `Started` for the same delivery is ambiguous, because the broker did not count the return
  between them and either run may hold the job. The later run requeues its job. If it did hold the
  job, this leads to a newer delivery, so no run that holds the job continues while its events are
  dropped.
* `PromptScores` are accepted only from the current attempt, in order for each prompt, and once.
* A `TokenDelta`, `Finished` or `Failed` is accepted only if its attempt is the current attempt, its
  index equals the number of tokens accepted so far, and its prefix hash matches them. All others
  are repetitions, or late events of a replaced worker, and are dropped.
* A run that is still waiting for `Continue` has no position in the log. Its `Failed` contains its
  ticket instead, and is accepted if the run belongs to the newest delivery, since the job may be
  gone with it.
* Every `Started` except the first is answered with `Continue`, and the previous run is cancelled.
  So is a first `Started` that waits, because the run before it crashed without writing an event. A
  run that repeats its `Started` has not received the answer, and is sent it again.
* A log whose node of the broker dies is recreated in another queue by its reader, if it is read.
  The new log starts with `Restored`, a copy of the events that counted; nothing before it counts.
  The worker finds the new log, asks where to continue, as after a redelivery, and continues there.
* The request ends with the `Finished` of its last choice or with `Failed`. At an event that cannot
  be decoded it ends with ``internal_error``, for every reader.

Writers use `LogWriter`, readers `LogReader` or `LogCopy`, and workers decide with `writer.Attempt`
whether to run a delivery.
"""

from shared.log.reader import (
    EMPTY_HASH,
    Action,
    Kept,
    LogCopy,
    LogReader,
    Relay,
    Run,
    Send,
    TokenChain,
    extend_hash,
    is_acceptance,
)
from shared.log.writer import LogWriter

__all__ = [
    "EMPTY_HASH",
    "Action",
    "Kept",
    "LogCopy",
    "LogReader",
    "LogWriter",
    "Relay",
    "Run",
    "Send",
    "TokenChain",
    "extend_hash",
    "is_acceptance",
]

"""The rules of a request's event log, as pure state machines: no clock, no socket.

A request's log is its reply queue. Workers append events; whoever reads the log from its start
comes to the same stream, because acceptance depends on the log's order alone:

* Each `Started` opens an attempt; attempt 1 is that of the job's very first delivery. One that
  repeats the last one's ticket is a repetition. A run that another one replaces has crashed,
  unless it says `HandedOver`, be it late, or the broker left it together with the log's reader.
* A `Started` of an older delivery of the job than the newest one seen opens nothing: it is the late
  word of a worker that the broker took for dead, and that worker is told to stop. A copy in
  quarantine is newer than its equal in company.
* Nor does another one of the newest delivery, which came back uncounted: there is no telling which
  of the two has the job. The later one gives it back, and it comes again as a newer one if it had
  it: no run that has the job goes on while its words are dropped.
* `PromptScores` count only in the current attempt, each prompt's in order, and once.
* A `TokenDelta`, `Finished` or `Failed` counts only if its attempt is the current one, its index
  is the number of tokens accepted so far, and its prefix hash is theirs. All else is a late word
  of a worker that was replaced, or a repetition, and is dropped.
* A run that still waits does not know where the log stands: its `Failed` bears its ticket, and
  counts if it is one of the newest delivery, since with it the job may be gone.
* Every `Started` but the first is answered with `Continue`, and the worker before it is cancelled;
  the first one too where it waits, because the worker before it died without a word. One that
  waits and repeats itself has not heard the answer, and gets it again.
* The request ends with the `Finished` of its last choice, or with `Failed`; at an event that cannot
  be decoded it ends with `internal_error`, whoever reads it.
"""

from shared.log.chain import EMPTY_HASH, TokenChain, extend_hash
from shared.log.reader import Action, LogReader, Relay, Run, Send
from shared.log.writer import LogWriter

__all__ = [
    "EMPTY_HASH",
    "Action",
    "LogReader",
    "LogWriter",
    "Relay",
    "Run",
    "Send",
    "TokenChain",
    "extend_hash",
]

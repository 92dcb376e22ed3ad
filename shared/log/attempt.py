"""The rules of a request's log on the worker's side: what becomes of one delivery of a job.

* A job that was never delivered nor published before starts at once, as attempt 1.
* Any other writes `Started` and waits until the log's reader, or the worker's own reading of the
  log where it has no reader, says where to go on.
* A job that was running at two crashes goes on in quarantine, where it endangers nothing else and
  says `Started` only once nothing else runs. One that crashes then is buried: its reader is told,
  and it goes to the dead letters. If its worker dies before that, nothing counts as its crash.
"""

from collections.abc import Iterable
from enum import Enum, auto
from typing import TypeGuard

from shared.log import LogReader, LogWriter, Send
from shared.messages import Cancel, Command, Continue, ReplyEvent

MAX_CRASHES = 2
"""In company; the next one in quarantine is the last."""
HEARINGS = 4
"""How often an attempt asks, waiting a second each time, before it believes in so many crashes that
the job would suffer for them: a run that was cut off, as all are when the broker restarts, says
only later that it lives. While the broker's clients come back it believes in none."""


class Verdict(Enum):
    """What a command asks of an attempt."""

    GO_ON = auto()
    """From where `Attempt.log` stands now."""
    STOP = auto()
    """Nobody wants its words any more: acknowledge the job."""
    GIVE_BACK = auto()
    """Another run has the stream: return the job to its queue."""
    QUARANTINE = auto()
    """Publish the job to the suspects, say that it is handed over, and acknowledge it."""
    BURY = auto()
    """Say that it failed, and reject it to the dead letters."""
    FAIL = auto()
    """Nobody can read the log: say that the request failed, and acknowledge the job."""


class Attempt:
    """One delivery of a job with ``num_choices`` choices in all. ``ticket`` is its own."""

    def __init__(
        self,
        request_id: str,
        num_choices: int,
        *,
        ticket: str,
        num_returns: int = 0,
        publication: int = 0,
        is_suspect: bool = False,
    ) -> None:
        self.ticket = ticket
        self.is_first = not (num_returns or publication or is_suspect)
        self.log: LogWriter | None = LogWriter(1, num_choices) if self.is_first else None
        """None while it waits."""
        self._request_id = request_id
        self._num_choices = num_choices
        self._is_suspect = is_suspect
        self._num_hearings = 0

    def obey(self, command: Cancel | Continue, *, is_settled: bool = True) -> Verdict | None:
        """Follow the log's reader; None where the command is for another run or comes late.

        ``is_settled``: nobody who lives can still be without the broker; see `shared.bus.base.Bus`.
        """
        if not self._is_told(command):
            return None
        if isinstance(command, Cancel):
            return Verdict.GIVE_BACK if command.is_replaced else Verdict.STOP
        if self.log is not None or len(command.choices) != self._num_choices:
            return None
        verdict = self._judge(command) if is_settled else Verdict.GO_ON
        if verdict is not Verdict.GO_ON:
            self._num_hearings += 1
            if self._num_hearings < HEARINGS:
                return None
        self.log = LogWriter.resume(command)
        return verdict

    def read(self, log: Iterable[ReplyEvent | None], *, is_settled: bool = True) -> Verdict | None:
        """Take the reader's part where there is none: ``log`` is the log from its start, with None
        in place of what cannot be decoded.

        None where it does not hold this attempt's `Started` yet.
        """
        reader = LogReader(self._request_id, self._num_choices)
        told: Cancel | Continue | None = None
        is_readable = True
        for event in log:
            is_readable = is_readable and event is not None
            for action in () if event is None else reader.read(event):
                if isinstance(action, Send) and self._is_told(action.command):
                    told = action.command
        if reader.is_ended:
            return Verdict.STOP
        verdict = None if told is None else self.obey(told, is_settled=is_settled)
        return verdict if is_readable or self.log is None else Verdict.FAIL

    def _is_told(self, command: Command) -> TypeGuard[Cancel | Continue]:
        return isinstance(command, Cancel | Continue) and command.ticket in (None, self.ticket)

    def _judge(self, command: Continue) -> Verdict:
        if self._is_suspect and command.num_crashes_alone:
            return Verdict.BURY
        if not self._is_suspect and command.num_crashes >= MAX_CRASHES:
            return Verdict.QUARANTINE
        return Verdict.GO_ON

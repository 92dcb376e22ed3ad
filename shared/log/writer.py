"""The writer's side of the log protocol: what happens to a delivery of a job, and the position of
each event that it writes.

* A job that was neither delivered nor published before starts at once, as attempt 1.
* Any other job writes `Started` and waits for the position from which to continue. The log's reader
  sends it; if there is no reader, the worker reads the log itself.
* A job that has crashed twice (`LogReader.num_crashes` says what counts) continues in quarantine,
  so no other job is at risk; it writes `Started` only once nothing else runs. If it crashes there,
  its reader receives an error and the job is dead-lettered. If its worker dies before that
  `Started`, no crash is counted.
"""

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import TypeGuard

from shared.log.reader import LogReader, Send, TokenChain
from shared.messages import (
    Cancel,
    Command,
    Continue,
    Failed,
    Finished,
    FinishReason,
    Replaced,
    ReplyEvent,
    TokenDelta,
    TokenLogprobs,
)

MAX_CRASHES = 2
"""Crashes outside quarantine before a job is quarantined. A crash in quarantine is its last."""
NUM_INQUIRIES = 4
"""How often an attempt asks again, a second apart, before it acts on a crash count that would
quarantine or dead-letter the job. A run that was only disconnected, as all runs are when the broker
restarts, writes its `HandedOver` late. While the broker's clients reconnect, no crash is acted
upon."""


class LogWriter:
    """Writes the events of an attempt, each with its position in the log."""

    def __init__(self, attempt: int, num_choices: int, execution: int = 0) -> None:
        """``execution``: that of the job."""
        self.attempt = attempt
        self.execution = execution
        self.chains = TokenChain.of(num_choices, execution)

    @classmethod
    def resume(cls, command: Continue, execution: int = 0) -> "LogWriter":
        """Create the writer that continues from the reader's position."""
        writer = cls(command.attempt, len(command.choices), execution)
        for chain, progress in zip(writer.chains, command.choices, strict=True):
            chain.extend(progress.token_ids)
            chain.is_finished = progress.is_finished
            chain.num_cached_tokens = progress.num_cached_tokens
        return writer

    @property
    def is_ended(self) -> bool:
        return all(chain.is_finished for chain in self.chains)

    def missing(self, choice: int, given_ids: Sequence[int]) -> Sequence[int]:
        """Of the tokens with which a choice has to begin, those that the log does not have yet."""
        return given_ids[len(self.chains[choice].token_ids) :]

    def delta(
        self,
        choice: int,
        token_ids: Sequence[int],
        text: str,
        *,
        num_chars: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> TokenDelta:
        chain = self.chains[choice]
        event = TokenDelta(
            choice=choice,
            attempt=self.attempt,
            index=len(chain.token_ids),
            prefix_hash=chain.prefix_hash,
            token_ids=tuple(token_ids),
            text=text,
            num_chars=tuple(num_chars),
            logprobs=tuple(logprobs),
        )
        chain.extend(token_ids)
        return event

    def finish(
        self,
        choice: int,
        token_ids: Sequence[int],
        text: str,
        finish_reason: FinishReason,
        stop_reason: str | int | None = None,
        *,
        num_cached_tokens: int = 0,
        num_predicted_tokens: int = 0,
        num_chars: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
        has_end_token: bool = False,
    ) -> Finished:
        chain = self.chains[choice]
        event = Finished(
            choice=choice,
            attempt=self.attempt,
            index=len(chain.token_ids),
            prefix_hash=chain.prefix_hash,
            token_ids=tuple(token_ids),
            text=text,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=num_cached_tokens,
            num_predicted_tokens=num_predicted_tokens,
            num_chars=tuple(num_chars),
            logprobs=tuple(logprobs),
            has_end_token=has_end_token,
        )
        chain.extend(token_ids)
        chain.is_finished = True
        chain.num_cached_tokens = num_cached_tokens
        return event

    def fail(self, code: str, message: str, param: str | None = None) -> Failed:
        """The failure of the whole request, at the position of its first unfinished choice."""
        choice, chain = next(
            (k, chain) for k, chain in enumerate(self.chains) if not chain.is_finished
        )
        return Failed(
            code=code,
            message=message,
            param=param,
            choice=choice,
            attempt=self.attempt,
            index=len(chain.token_ids),
            prefix_hash=chain.prefix_hash,
            execution=self.execution,
        )


class Verdict(Enum):
    """The effect of a command on an attempt."""

    CONTINUE = auto()
    """Continue from the position of `Attempt.log`."""
    STOP = auto()
    """No reader needs further events: acknowledge the job."""
    OUTRUN = auto()
    """The run that this run hedges was faster: acknowledge the job without an answer."""
    FOREIGN = auto()
    """The log is of another execution: acknowledge the job without an answer."""
    ENDED = auto()
    """The log has ended: acknowledge the job."""
    REQUEUE = auto()
    """Another run owns the stream: requeue the job."""
    QUARANTINE = auto()
    """Publish the job to the suspect queue, write `HandedOver`, and acknowledge it."""
    DEAD_LETTER = auto()
    """Write that the job failed, and dead-letter it."""
    FAIL = auto()
    """The log cannot be decoded: write that the request failed, and acknowledge the job."""


class Attempt:
    """A delivery of a job with ``num_choices`` choices in all. ``ticket`` is its fencing token."""

    def __init__(
        self,
        request_id: str,
        num_choices: int,
        *,
        ticket: str,
        num_returns: int = 0,
        publication: int = 0,
        is_suspect: bool = False,
        execution: int = 0,
    ) -> None:
        self.ticket = ticket
        self.num_moves = 0
        self.is_first = not (num_returns or publication or is_suspect)
        self.log = LogWriter(1, num_choices, execution) if self.is_first else None
        """None while the attempt waits for `Continue`."""
        self.replaced: Replaced | None = None
        """The run before this run, if its reader has named it."""
        self.is_contested = False
        """Whether this run is a hedge, and not the log's writer as far as it knows."""
        self.is_continued = False
        """Whether another run has been there. A job that waited in vain for its worker is delivered
        for the second time, and runs for the first time."""
        self.numerics = ""
        """The numerics of the tokens before this run; empty if there are none, or if they are not
        known."""
        self._request_id = request_id
        self._num_choices = num_choices
        self._execution = execution
        self._is_suspect = is_suspect
        self._num_inquiries = 0

    def forget_place(self) -> None:
        """Ask again where to continue, because the log was recreated: its reader may not have
        read everything that was written."""
        self.num_moves += 1
        self.is_first = False
        self.is_contested = False
        self.log = None
        self._num_inquiries = 0

    def obey(self, command: Cancel | Continue, *, is_settled: bool = True) -> Verdict | None:
        """Apply a command of the log's reader; None if it is meant for another run or arrives late.

        ``is_settled``: every live process has reconnected to the broker; see `shared.bus.base.Bus`.
        """
        if not self._is_recipient(command):
            return None
        if isinstance(command, Cancel) and command.is_foreign:
            return Verdict.FOREIGN
        if isinstance(command, Cancel) and command.is_outrun:
            return Verdict.OUTRUN
        if isinstance(command, Cancel):
            return Verdict.REQUEUE if command.is_replaced else Verdict.STOP
        if self.log is not None and command.attempt == self.log.attempt:
            self.is_contested &= command.is_contested
        if self.log is not None or len(command.choices) != self._num_choices:
            return None
        verdict = self._judge(command) if is_settled else Verdict.CONTINUE
        if verdict is not Verdict.CONTINUE:
            self._num_inquiries += 1
            if self._num_inquiries < NUM_INQUIRIES:
                return None
        self.log = LogWriter.resume(command, self._execution)
        self.replaced = command.replaced
        self.is_contested = command.is_contested
        has_tokens = any(choice.token_ids for choice in command.choices)
        self.is_continued = has_tokens or command.replaced is not None
        self.numerics = command.numerics
        return verdict

    def read(
        self,
        log: Iterable[ReplyEvent | None],
        *,
        is_settled: bool = True,
        is_renewed: bool = False,
    ) -> Verdict | None:
        """Decide as a reader would, if the log has none. ``log`` is the log from its start, with
        None for each event that cannot be decoded; ``is_renewed`` as for `LogReader`.

        Returns None if the log does not contain this attempt's `Started` yet.
        """
        reader = LogReader(self._request_id, self._num_choices, is_renewed=is_renewed)
        command: Cancel | Continue | None = None
        is_readable = True
        for event in log:
            is_readable = is_readable and event is not None
            for action in () if event is None else reader.read(event):
                if isinstance(action, Send) and self._is_recipient(action.command):
                    command = action.command
        if reader.is_ended:
            return Verdict.ENDED
        verdict = None if command is None else self.obey(command, is_settled=is_settled)
        return verdict if is_readable or self.log is None else Verdict.FAIL

    def _is_recipient(self, command: Command) -> TypeGuard[Cancel | Continue]:
        if isinstance(command, Continue) and command.num_moves != self.num_moves:
            return False
        return isinstance(command, Cancel | Continue) and command.ticket in (None, self.ticket)

    def _judge(self, command: Continue) -> Verdict:
        if self._is_suspect and command.num_crashes_alone:
            return Verdict.DEAD_LETTER
        if not self._is_suspect and command.num_crashes >= MAX_CRASHES:
            return Verdict.QUARANTINE
        return Verdict.CONTINUE

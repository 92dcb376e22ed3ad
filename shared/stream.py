"""The rules of a request's event log, as pure state machines: no clock, no socket.

A request's log is its reply queue. Workers append events; whoever reads the log from its start
comes to the same stream, because acceptance depends on the log's order alone:

* Each `Started` opens an attempt; attempt 1 is that of the job's very first delivery. One that
  repeats the last one's ticket is a repetition. A run that another one replaces has crashed,
  unless it says `HandedOver`, be it late.
* A `Started` of an older delivery of the job than the newest one seen opens nothing: it is the late
  word of a worker that the broker took for dead, and that worker is told to stop.
* `PromptScores` count only in the current attempt, each prompt's in order, and once.
* A `TokenDelta`, `Finished` or `Failed` counts only if its attempt is the current one, its index
  is the number of tokens accepted so far, and its prefix hash is theirs. All else is a late word
  of a worker that was replaced, or a repetition, and is dropped.
* Every `Started` but the first is answered with `Continue`, and the worker before it is cancelled;
  the first one too where it waits, because the worker before it died without a word. One that
  waits and repeats itself has not heard the answer, and gets it again; if it was replaced since, it
  is told so again.
* The request ends with the `Finished` of its last choice, or with `Failed`; at an event that cannot
  be decoded it ends with `internal_error`, whoever reads it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct

from shared.messages import (
    Accepted,
    Cancel,
    Command,
    Continue,
    Failed,
    Finished,
    FinishReason,
    HandedOver,
    Progress,
    PromptScores,
    ReplyEvent,
    Started,
    TokenDelta,
    TokenLogprobs,
)

EMPTY_HASH = 0xCBF29CE484222325
_HASH_PRIME = 0x100000001B3
_HASH_MASK = (1 << 64) - 1


def extend_hash(prefix_hash: int, token_ids: Iterable[int]) -> int:
    """FNV-1a over whole token ids, 64 bits; `EMPTY_HASH` stands for no tokens."""
    for token_id in token_ids:
        prefix_hash = ((prefix_hash ^ token_id) * _HASH_PRIME) & _HASH_MASK
    return prefix_hash


@dataclass(slots=True)
class TokenChain:
    """The token ids of one choice and their hash, on either side of the log."""

    token_ids: list[int] = field(default_factory=list)
    prefix_hash: int = EMPTY_HASH
    is_finished: bool = False

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.prefix_hash = extend_hash(self.prefix_hash, token_ids)

    def stands_at(self, index: int, prefix_hash: int) -> bool:
        """Whether what is at this position follows the chain's tokens."""
        return index == len(self.token_ids) and prefix_hash == self.prefix_hash


class Relay(Struct, frozen=True):
    """Pass ``event`` on. ``ordinal`` numbers the accepted events from 1; `Started` bears the
    number of the event before it."""

    ordinal: int
    event: Started | PromptScores | TokenDelta | Finished | Failed


class Send(Struct, frozen=True):
    """Send ``command`` to the worker at ``address``."""

    address: str
    command: Command


Action: TypeAlias = Relay | Send


@dataclass(frozen=True, slots=True)
class Run:
    """What a crash says of the job depends on these."""

    publication: int
    """The job's."""
    is_alone: bool
    """Nothing else ran in the worker."""


class LogReader:
    """Reads the log of one request with ``num_choices`` choices in all, event by event."""

    def __init__(self, request_id: str, num_choices: int) -> None:
        self.request_id = request_id
        self.chains = [TokenChain() for _ in range(num_choices)]
        self.num_scored: dict[int, int] = {}
        """Tokens of each prompt whose scores were accepted."""
        self.attempt = 0
        self.ordinal = 0
        self.worker: str | None = None
        self.ticket: str | None = None
        self.body_hash: str | None = None
        self.is_ended = False
        self._delivery = (0, 0)
        self._run = Run(0, is_alone=False)
        self._replaced: dict[str, Run] = {}
        """By ticket."""
        self._handed_over: set[str] = set()

    @property
    def num_crashes(self) -> int:
        """Runs that another one replaced and that have not said, then or later, that they live."""
        return len(self._replaced.keys() - self._handed_over)

    @property
    def num_crashes_alone(self) -> int:
        """Those of the job as it was published last that were alone."""
        crashed = self._replaced.keys() - self._handed_over
        return sum(self._was_alone(self._replaced[ticket]) for ticket in crashed)

    def read(self, event: ReplyEvent) -> list[Action]:
        """Take the log's next event; returns what to do about it, in order."""
        if self.is_ended:
            return []
        match event:
            case TokenDelta() | Finished():
                return self._extend(event)
            case Started():
                return self._start(event)
            case Accepted():
                self.body_hash = self.body_hash or event.body_hash
                return []
            case HandedOver():
                self._handed_over.add(event.ticket)
                return []
            case PromptScores():
                return self._score(event)
            case Failed():
                return self._fail(event)
            case _:
                return []

    def cancel(self) -> list[Send]:
        """The reader's client is gone: what to send so that no work goes on."""
        return self._cancel()

    def _cancel(self, *, is_replaced: bool = False) -> list[Send]:
        if self.is_ended or self.worker is None:
            return []
        return [self._stop(self.worker, self.ticket, is_replaced=is_replaced)]

    def _stop(self, worker: str, ticket: str | None, *, is_replaced: bool = False) -> Send:
        command = Cancel(request_id=self.request_id, ticket=ticket, is_replaced=is_replaced)
        return Send(worker, command)

    def _start(self, event: Started) -> list[Action]:
        if self._is_repeated(event):
            return [Send(event.worker, self._continue(event.ticket))] if event.is_waiting else []
        if self._is_late(event):
            return [self._stop(event.worker, event.ticket)]
        if event.ticket in self._replaced:
            return [self._stop(event.worker, event.ticket, is_replaced=True)]
        fence = self._cancel(is_replaced=True)
        if self.ticket is not None:
            self._replaced[self.ticket] = self._run
        self._delivery = event.publication, event.num_returns
        self._run = Run(event.publication, is_alone=event.is_alone)
        self.worker, self.ticket = event.worker, event.ticket
        # Attempt 1 is that of the worker that did not ask, even if it comes late.
        self.attempt = max(self.attempt, int(event.is_waiting)) + 1
        start: list[Action] = [Relay(self.ordinal, event), *fence]
        if fence or event.is_waiting:
            start.append(Send(event.worker, self._continue(event.ticket)))
        return start

    def _is_repeated(self, event: Started) -> bool:
        return event.ticket == self.ticket

    def _is_late(self, event: Started) -> bool:
        return (event.publication, event.num_returns) < self._delivery

    def _was_alone(self, run: Run) -> bool:
        return run.is_alone and run.publication == self._run.publication

    def _continue(self, ticket: str) -> Continue:
        return Continue(
            request_id=self.request_id,
            ticket=ticket,
            attempt=self.attempt,
            num_crashes=self.num_crashes,
            num_crashes_alone=self.num_crashes_alone,
            choices=tuple(
                Progress(token_ids=tuple(chain.token_ids), is_finished=chain.is_finished)
                for chain in self.chains
            ),
        )

    def _score(self, event: PromptScores) -> list[Action]:
        num_scored = self.num_scored.get(event.prompt, 0)
        if not self._is_current(event) or event.start != num_scored:
            return []
        self.num_scored[event.prompt] = num_scored + len(event.token_ids)
        return [self._relay(event)]

    def _extend(self, event: TokenDelta | Finished) -> list[Action]:
        if not (self._is_current(event) and self._is_next(event)):
            return []
        chain = self.chains[event.choice]
        chain.extend(event.token_ids)
        if isinstance(event, Finished):
            chain.is_finished = True
            self.is_ended = all(chain.is_finished for chain in self.chains)
        return [self._relay(event)]

    def _fail(self, event: Failed) -> list[Action]:
        is_refused = event.attempt == 0 and not any(chain.token_ids for chain in self.chains)
        if not is_refused and not (self._is_current(event) and self._is_next(event)):
            return []
        self.is_ended = True
        return [self._relay(event)]

    def _is_current(self, event: PromptScores | TokenDelta | Finished | Failed) -> bool:
        return event.attempt == self.attempt

    def _is_next(self, event: TokenDelta | Finished | Failed) -> bool:
        if event.choice >= len(self.chains):
            return False
        chain = self.chains[event.choice]
        return not chain.is_finished and chain.stands_at(event.index, event.prefix_hash)

    def _relay(self, event: PromptScores | TokenDelta | Finished | Failed) -> Relay:
        self.ordinal += 1
        return Relay(self.ordinal, event)


class LogWriter:
    """Writes one attempt's events, each at its position in the log."""

    def __init__(self, attempt: int, num_choices: int) -> None:
        self.attempt = attempt
        self.chains = [TokenChain() for _ in range(num_choices)]

    @classmethod
    def resume(cls, command: Continue) -> "LogWriter":
        """The writer that goes on where the reader stands."""
        writer = cls(command.attempt, len(command.choices))
        for chain, progress in zip(writer.chains, command.choices, strict=True):
            chain.extend(progress.token_ids)
            chain.is_finished = progress.is_finished
        return writer

    @property
    def is_ended(self) -> bool:
        return all(chain.is_finished for chain in self.chains)

    def delta(
        self,
        choice: int,
        token_ids: Sequence[int],
        text: str,
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
        logprobs: Sequence[TokenLogprobs] = (),
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
            logprobs=tuple(logprobs),
        )
        chain.extend(token_ids)
        chain.is_finished = True
        return event

    def fail(self, code: str, message: str, param: str | None = None) -> Failed:
        """The whole request fails, at the position of its first unfinished choice."""
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
        )

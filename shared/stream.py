"""The rules of a request's event log, as pure state machines: no clock, no socket.

A request's log is its reply queue. Workers append events; whoever reads the log from its start
comes to the same stream, because acceptance depends on the log's order alone:

* The n-th `Started` opens attempt n; one that repeats the last one's ticket is a repetition. A
  `Started` that follows no `HandedOver` is a crash.
* A `TokenDelta`, `Finished` or `Failed` counts only if its attempt is the current one, its index
  is the number of tokens accepted so far, and its prefix hash is theirs. All else is a late word
  of a worker that was replaced, or a repetition, and is dropped.
* Every `Started` but the first is answered with `Continue`, and the worker before it is cancelled;
  the first one too where it waits, because the worker before it died without a word.
* The request ends with the `Finished` of its last choice, or with `Failed`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

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
    ReplyEvent,
    Started,
    TokenDelta,
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

    def is_next(self, index: int, prefix_hash: int) -> bool:
        """Whether an event at this position continues the chain."""
        return (
            not self.is_finished
            and index == len(self.token_ids)
            and prefix_hash == self.prefix_hash
        )


@dataclass(frozen=True, slots=True)
class Relay:
    """Pass ``event`` on. ``ordinal`` numbers the accepted events from 1; `Started` bears the
    number of the event before it."""

    ordinal: int
    event: Started | TokenDelta | Finished | Failed


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``command`` to the worker at ``address``."""

    address: str
    command: Command


Action: TypeAlias = Relay | Send


class LogReader:
    """Reads the log of one request with ``num_choices`` choices, event by event."""

    def __init__(self, request_id: str, num_choices: int) -> None:
        self.request_id = request_id
        self.chains = [TokenChain() for _ in range(num_choices)]
        self.attempt = 0
        self.num_crashes = 0
        self.ordinal = 0
        self.worker: str | None = None
        self.ticket: str | None = None
        self.body_hash: str | None = None
        self.is_ended = False
        self._is_handed_over = False

    def read(self, event: ReplyEvent) -> list[Action]:
        """Take the log's next event; returns what to do about it, in order."""
        if self.is_ended:
            return []
        match event:
            case Accepted():
                self.body_hash = self.body_hash or event.body_hash
                return []
            case Started():
                return self._start(event)
            case HandedOver():
                self._is_handed_over = event.attempt == self.attempt
                return []
            case TokenDelta() | Finished():
                return self._extend(event)
            case Failed():
                return self._fail(event)
            case _:
                return []

    def cancel(self) -> list[Send]:
        """The reader's client is gone: what to send so that no work goes on."""
        if self.is_ended or self.worker is None:
            return []
        return [Send(self.worker, Cancel(request_id=self.request_id, ticket=self.ticket))]

    def _start(self, event: Started) -> list[Action]:
        if event.ticket == self.ticket:
            return []
        fence = self.cancel()
        self.num_crashes += bool(fence) and not self._is_handed_over
        self.worker, self.ticket = event.worker, event.ticket
        self.attempt += 1
        self._is_handed_over = False
        start: list[Action] = [Relay(self.ordinal, event), *fence]
        if fence or event.is_waiting:
            start.append(Send(event.worker, self._continue(event.ticket)))
        return start

    def _continue(self, ticket: str) -> Continue:
        return Continue(
            request_id=self.request_id,
            ticket=ticket,
            attempt=self.attempt,
            choices=tuple(
                Progress(token_ids=tuple(chain.token_ids), is_finished=chain.is_finished)
                for chain in self.chains
            ),
        )

    def _extend(self, event: TokenDelta | Finished) -> list[Action]:
        if not self._fits(event):
            return []
        chain = self.chains[event.choice]
        chain.extend(event.token_ids)
        if isinstance(event, Finished):
            chain.is_finished = True
            self.is_ended = all(chain.is_finished for chain in self.chains)
        return [self._relay(event)]

    def _fail(self, event: Failed) -> list[Action]:
        is_refused = event.attempt == 0 and not any(chain.token_ids for chain in self.chains)
        if not is_refused and not self._fits(event):
            return []
        self.is_ended = True
        return [self._relay(event)]

    def _fits(self, event: TokenDelta | Finished | Failed) -> bool:
        return (
            event.attempt == self.attempt
            and event.choice < len(self.chains)
            and self.chains[event.choice].is_next(event.index, event.prefix_hash)
        )

    def _relay(self, event: TokenDelta | Finished | Failed) -> Relay:
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

    def delta(self, choice: int, token_ids: Sequence[int], text: str) -> TokenDelta:
        chain = self.chains[choice]
        event = TokenDelta(
            choice=choice,
            attempt=self.attempt,
            index=len(chain.token_ids),
            prefix_hash=chain.prefix_hash,
            token_ids=tuple(token_ids),
            text=text,
        )
        chain.extend(token_ids)
        return event

    def finish(
        self,
        choice: int,
        token_ids: Sequence[int],
        text: str,
        finish_reason: FinishReason,
        stop_reason: str | None = None,
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

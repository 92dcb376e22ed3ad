"""The reader's side of the log protocol: which events are accepted, and the commands that result.

A `TokenChain` holds the accepted tokens of a choice; readers and writers track them alike. A
`LogCopy` holds what counted, so that its reader can recreate the log. Most of a copy are token ids
and text: the events of a choice are joined, so that a token takes some tens of bytes.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from shared.messages import (
    Accepted,
    Cancel,
    Command,
    Continue,
    Failed,
    Finished,
    HandedOver,
    Hedge,
    Progress,
    PromptScores,
    Replaced,
    ReplyEvent,
    Restored,
    Started,
    TokenDelta,
)

EMPTY_HASH = 0xCBF29CE484222325
_HASH_PRIME = 0x100000001B3
_HASH_MASK = (1 << 64) - 1
MAX_EXCUSED = 6
"""Lost runs of a job that are not counted as crashes, because it got further in them. A job that
crashes its workers after some tokens each time is thus stopped as well."""
_MAX_APART = 32
"""Events that are kept apart before they are joined, which costs more than keeping them."""
_MAX_JOINED_TOKENS = 1024

Kept: TypeAlias = Accepted | Started | HandedOver | PromptScores | TokenDelta | Finished


def extend_hash(prefix_hash: int, token_ids: Iterable[int]) -> int:
    """Extend a 64-bit FNV-1a hash, over whole token ids; `EMPTY_HASH` is the hash of no tokens."""
    for token_id in token_ids:
        prefix_hash = ((prefix_hash ^ token_id) * _HASH_PRIME) & _HASH_MASK
    return prefix_hash


@dataclass(slots=True)
class TokenChain:
    """The token ids of a choice and their hash."""

    token_ids: list[int] = field(default_factory=list)
    prefix_hash: int = EMPTY_HASH
    is_finished: bool = False
    num_cached_tokens: int = 0
    """The cached prompt tokens of a finished choice, from its `Finished`."""

    @classmethod
    def of(cls, num_choices: int, execution: int) -> "list[TokenChain]":
        """A chain for each choice. Hashes begin with the number of the log's execution, unless it
        is 0, so that no event of an earlier execution has a position in the log."""
        return [cls(prefix_hash=execution or EMPTY_HASH) for _ in range(num_choices)]

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.prefix_hash = extend_hash(self.prefix_hash, token_ids)

    def stands_at(self, index: int, prefix_hash: int) -> bool:
        """Whether an event at this position directly follows the chain's tokens."""
        return index == len(self.token_ids) and prefix_hash == self.prefix_hash


class Relay(Struct, frozen=True):
    """Pass ``event`` on. ``ordinal`` numbers the accepted events from 1; a `Started` has the number
    of the event before it."""

    ordinal: int
    event: Started | PromptScores | TokenDelta | Finished | Failed


class Send(Struct, frozen=True):
    """Send ``command`` to the worker at ``address``."""

    address: str
    command: Command


Action: TypeAlias = Relay | Send


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """The position of a run among the deliveries of its job; a newer delivery compares greater.

    Two runs are equal if the broker did not count the return between their deliveries.
    """

    publication: int
    """The publication number of the job."""
    is_alone: bool
    """Whether the job ran in quarantine, with nothing else in the worker."""
    num_returns: int

    @classmethod
    def of(cls, event: Started) -> "Run":
        return cls(event.publication, event.is_alone, event.num_returns)


_NO_RUN = Run(-1, is_alone=False, num_returns=0)


@dataclass(frozen=True, slots=True)
class Challenger:
    """A hedge: a run that may become the log's writer by writing before the current run does."""

    started: Started
    attempt: int
    """The attempt that it opens if it becomes the writer."""

    @property
    def run(self) -> Run:
        return Run.of(self.started)


def is_acceptance(event: Accepted) -> bool:
    """Whether a gateway has accepted the request. Otherwise the event only marks the position up to
    which a gateway reads."""
    return bool(event.body_hash or event.context)


class LogReader:
    """Reads the log of a request with ``num_choices`` choices in all, event by event."""

    def __init__(
        self,
        request_id: str,
        num_choices: int,
        cut_off: Iterable[str] = (),
        *,
        is_renewed: bool = False,
    ) -> None:
        """``cut_off`` are the tickets of runs that lost the broker together with the log's reader.
        When another run replaces such a run, it is not counted as a crash.

        ``is_renewed``: the log was recreated, so that nothing counts before its `Restored`."""
        self.request_id = request_id
        self.execution = 0
        """The number of the log's execution; 0 if the request's id is used once."""
        self.chains = TokenChain.of(num_choices, self.execution)
        self.num_scored: dict[int, int] = {}
        """The number of accepted scores for each prompt."""
        self.attempt = 0
        self.ordinal = 0
        self.worker: str | None = None
        self.ticket: str | None = None
        self.replaced: Replaced | None = None
        """The run before the current run."""
        self.body_hash: str | None = None
        self._num_accepted = 0
        """The `Accepted` events so far. Each gateway that wrote an `Accepted` may have published
        the job."""
        self.is_ended = False
        self.is_waiting = is_renewed
        """Whether nothing counts yet."""
        self.numerics = ""
        """The numerics of the run that generated the last accepted tokens; empty if there are none,
        or if it does not state them."""
        self._run = _NO_RUN
        self._run_numerics = ""
        self._challenger: Challenger | None = None
        self._won: set[int] = set()
        """The hedges that have become the log's writer, by their numbers."""
        self._last_attempt = 0
        """The highest attempt so far, of a run or of a challenger."""
        self._outrun: set[str] = set()
        """The tickets of hedges that came too late, and of runs that a hedge has outrun."""
        self._contenders: set[str] = set()
        """The tickets of the runs of the newest delivery; any of them may hold the job."""
        self._replaced: dict[str, Run] = {}
        """The replaced runs by ticket."""
        self._productive: dict[str | None, None] = {}
        """The tickets of the runs that generated tokens or scores that count, in order."""
        self._cut_off = frozenset(cut_off)
        self._handed_over = set(cut_off)

    @property
    def run_numerics(self) -> str:
        """The numerics of the current run."""
        return self._run_numerics

    @property
    def publication(self) -> int:
        """The publication of the current run; -1 if no run has started."""
        return self._run.publication

    def has_won(self, hedge: Hedge) -> bool:
        """Whether a run of the hedge is, or was, the log's writer."""
        return hedge.number in self._won

    @property
    def num_tokens(self) -> int:
        """The number of accepted tokens, of all choices together."""
        return sum(len(chain.token_ids) for chain in self.chains)

    @property
    def num_lost_runs(self) -> int:
        """Replaced runs without a `HandedOver`, so far."""
        return len(self._lost_runs())

    @property
    def num_crashes(self) -> int:
        """Lost runs, but for the first `MAX_EXCUSED` that generated something that counts. These do
        not make a job suspicious: most jobs that crash their workers do so at the same token."""
        return len(self._crashes())

    @property
    def num_crashes_alone(self) -> int:
        """Crashes in quarantine of the job's latest publication."""
        return sum(self._was_alone(self._replaced[ticket]) for ticket in self._crashes())

    def _lost_runs(self) -> set[str]:
        return self._replaced.keys() - self._handed_over - self._outrun

    def _crashes(self) -> set[str]:
        lost = self._lost_runs()
        productive = [ticket for ticket in self._productive if ticket in lost]
        return lost - set(productive[:MAX_EXCUSED])

    def is_foreign(self, event: Started | PromptScores | Failed) -> bool:
        """Whether the event is of an earlier execution, whose job was left in its queue when the
        log was deleted."""
        return event.execution not in (0, self.execution)

    def read(self, event: ReplyEvent) -> list[Action]:
        """Process the next event of the log; returns the resulting actions in order."""
        if self.is_waiting and isinstance(event, Restored):
            return self._restore(event)
        if self.is_ended or self.is_waiting:
            return []
        match event:
            case TokenDelta() | Finished():
                return self._extend(event)
            case Started():
                return self._start(event)
            case Accepted():
                return self._accept(event)
            case HandedOver():
                self._handed_over.add(event.ticket)
                return []
            case PromptScores():
                return self._score(event)
            case Failed():
                return self._fail(event)
            case _:
                return []

    def _restore(self, restored: Restored) -> list[Action]:
        """Read what counted before. Its commands were sent then."""
        self.is_waiting = False
        actions = [action for event in restored.events for action in self.read(event)]
        return [action for action in actions if isinstance(action, Relay)]

    def cancel(self) -> list[Send]:
        """The commands that stop the job, for a reader whose client is gone."""
        return [*self._cancel(), *self._stop_challenger()]

    def _cancel(self, *, is_replaced: bool = False) -> list[Send]:
        if self.is_ended or self.worker is None:
            return []
        return [self._stop(self.worker, self.ticket, is_replaced=is_replaced)]

    def _stop(self, worker: str, ticket: str | None, **reason: bool) -> Send:
        return Send(worker, Cancel(request_id=self.request_id, ticket=ticket, **reason))

    def _accept(self, event: Accepted) -> list[Action]:
        self.body_hash = self.body_hash or event.body_hash
        if is_acceptance(event):
            if not self._num_accepted and self._run == _NO_RUN:
                self.execution = event.execution
                self.chains = TokenChain.of(len(self.chains), event.execution)
            self._num_accepted += 1
        return []

    def _start(self, event: Started) -> list[Action]:
        run = Run.of(event)
        if self.is_foreign(event):
            return [self._stop(event.worker, event.ticket, is_foreign=True)]
        if event.ticket == self.ticket:
            return [Send(event.worker, self._continue(event))] if event.is_waiting else []
        if self._is_challenge(event):
            return self._challenge(event, run)
        if self._is_late(run):
            return [self._stop(event.worker, event.ticket)]
        if self._is_rival(run):
            self._contenders.add(event.ticket)
            return [self._stop(event.worker, event.ticket, is_replaced=True)]
        fence = [*self._cancel(is_replaced=True), *self._drop_challenger()]
        reason = "" if self.ticket is None else self._why_replaced(self.ticket, run)
        self._replace_by(event, self._next_attempt(event), reason)
        start: list[Action] = [Relay(self.ordinal, event)]
        if fence or event.is_waiting:
            start.append(Send(event.worker, self._continue(event)))
        return [*start, *fence]

    def _next_attempt(self, event: Started) -> int:
        # Attempt 1 is reserved for the run that did not wait, even if its `Started` arrives late.
        self._last_attempt = max(self._last_attempt, int(event.is_waiting)) + 1
        return self._last_attempt

    def _replace_by(self, event: Started, attempt: int, reason: str) -> None:
        """Make the run of ``event`` the log's writer."""
        if self.worker is not None and self.ticket is not None:
            self.replaced = Replaced(worker=self.worker, ticket=self.ticket, reason=reason)
            self._replaced[self.ticket] = self._run
        self._run, self._run_numerics = Run.of(event), event.numerics
        self.worker, self.ticket = event.worker, event.ticket
        self._contenders = {event.ticket}
        self.attempt = attempt
        if event.hedge is not None:
            self._won.add(event.hedge.number)

    def _is_challenge(self, event: Started) -> bool:
        """Whether the run only hedges the current run. A hedge without a run before it, and a later
        run of a hedge that has become the writer, are runs like others."""
        if event.hedge is None or self.ticket is None:
            return False
        return not self.has_won(event.hedge)

    def _challenge(self, event: Started, run: Run) -> list[Action]:
        before = self._challenger
        if before is not None and event.ticket == before.started.ticket:
            return [self._continue_challenger(before, event)] if event.is_waiting else []
        if self._is_too_late(event) or (before is not None and run < before.run):
            self._outrun.add(event.ticket)
            return [self._stop(event.worker, event.ticket, is_outrun=True)]
        if before is not None and run == before.run:
            return [self._stop(event.worker, event.ticket, is_replaced=True)]
        if before is not None and before.run.publication == run.publication:
            # A hedge that runs again without having written anything was lost with its worker.
            self._replaced[before.started.ticket] = before.run
        dropped = self._stop_challenger()
        self._challenger = Challenger(event, self._next_attempt(event))
        return [self._continue_challenger(self._challenger, event), *dropped]

    def _is_too_late(self, event: Started) -> bool:
        """Whether the log has got further since the hedge was published."""
        assert event.hedge is not None
        return event.ticket in self._outrun or event.hedge.num_tokens != self.num_tokens

    def _continue_challenger(self, challenger: Challenger, event: Started) -> Send:
        assert self.worker is not None
        assert self.ticket is not None
        hedged = Replaced(worker=self.worker, ticket=self.ticket, reason="outrun")
        command = replace(
            self._continue(event), attempt=challenger.attempt, replaced=hedged, is_contested=True
        )
        return Send(event.worker, command)

    def _stop_challenger(self) -> list[Send]:
        """The command that stops the hedge, if there is a hedge."""
        if self._challenger is None:
            return []
        started = self._challenger.started
        return [self._stop(started.worker, started.ticket, is_outrun=True)]

    def _drop_challenger(self) -> list[Send]:
        """Let the current run stay the writer."""
        stops = self._stop_challenger()
        if self._challenger is not None:
            self._outrun.add(self._challenger.started.ticket)
            self._challenger = None
        return stops

    def _let_write(self, event: PromptScores | TokenDelta | Finished) -> list[Action] | None:
        """Decide which run is the log's writer when a run writes ``event`` at the log's end.

        Returns what follows from the decision, or None if the event is late: neither the current
        run's nor the challenger's.
        """
        challenger = self._challenger
        if self._is_current(event):
            return [] if challenger is None else [*self._drop_challenger()]
        if challenger is None or event.attempt != challenger.attempt:
            return None
        assert self.ticket is not None
        fence = self._cancel(is_replaced=True)
        self._challenger = None
        self._outrun.add(self.ticket)
        started = challenger.started
        self._replace_by(started, challenger.attempt, "outrun")
        confirmed = Send(started.worker, replace(self._continue(started), choices=()))
        return [Relay(self.ordinal, started), confirmed, *fence]

    def _why_replaced(self, ticket: str, run: Run) -> str:
        """Why ``run`` replaces the run with ``ticket``, as far as the log shows it."""
        if ticket in self._cut_off:
            return "connection lost"
        if self._contenders & (self._handed_over - self._cut_off):
            # The run that was handed over may be a rival of the current run in the same delivery,
            # whose job has come back.
            return "handed over"
        if run.publication == self._run.publication:
            return "worker lost"
        is_copy = run.publication < self._num_accepted
        return "requested again" if is_copy else "worker silent"

    def _is_late(self, run: Run) -> bool:
        return run < self._run

    def _is_rival(self, run: Run) -> bool:
        return run == self._run

    def _was_alone(self, run: Run) -> bool:
        return run.is_alone and run.publication == self._run.publication

    def _continue(self, started: Started) -> Continue:
        return Continue(
            request_id=self.request_id,
            ticket=started.ticket,
            attempt=self.attempt,
            numerics=self.numerics,
            num_moves=started.num_moves,
            num_crashes=self.num_crashes,
            num_crashes_alone=self.num_crashes_alone,
            replaced=self.replaced,
            choices=tuple(
                Progress(
                    token_ids=tuple(chain.token_ids),
                    is_finished=chain.is_finished,
                    num_cached_tokens=chain.num_cached_tokens,
                )
                for chain in self.chains
            ),
        )

    def _score(self, event: PromptScores) -> list[Action]:
        num_scored = self.num_scored.get(event.prompt, 0)
        is_of_a_prompt = event.prompt < len(self.chains)  # each prompt has at least one choice
        if not is_of_a_prompt or self.is_foreign(event) or event.start != num_scored:
            return []
        decided = self._let_write(event)
        if decided is None:
            return []
        self.num_scored[event.prompt] = num_scored + len(event.token_ids)
        self._note_progress()
        return [*decided, self._relay(event)]

    def _extend(self, event: TokenDelta | Finished) -> list[Action]:
        if not self._is_next(event):
            return []
        decided = self._let_write(event)
        if decided is None:
            return []
        self._note_progress()
        chain = self.chains[event.choice]
        chain.extend(event.token_ids)
        if isinstance(event, Finished):
            chain.is_finished = True
            chain.num_cached_tokens = event.num_cached_tokens
            self.is_ended = all(chain.is_finished for chain in self.chains)
        return [*decided, self._relay(event)]

    def _note_progress(self) -> None:
        self.numerics = self._run_numerics
        self._productive[self.ticket] = None

    def _fail(self, event: Failed) -> list[Action]:
        if not self._counts(event):
            return []
        dropped = self._drop_challenger()
        self.is_ended = True
        return [self._relay(event), *dropped]

    def _counts(self, event: Failed) -> bool:
        if self.is_foreign(event):
            return False
        if event.ticket is not None:
            return event.ticket in self._contenders
        is_refused = event.attempt == 0 and not any(chain.token_ids for chain in self.chains)
        return is_refused or (self._is_current(event) and self._is_next(event))

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


class LogCopy:
    """The events of a log from which another reader comes to the same position. A `Failed` is not
    kept."""

    def __init__(self) -> None:
        self.num_kept = 0
        """How many tokens and other events are kept."""
        self._joined: list[Kept] = []
        self._recent: list[Kept] = []

    def keep(self, event: Kept) -> None:
        """Append an event that counts."""
        self.num_kept += len(event.token_ids) if isinstance(event, TokenDelta) else 1
        self._recent.append(event)
        if len(self._recent) >= _MAX_APART:
            self._join()

    def restored(self) -> Restored:
        """The copy as the first event of another log."""
        self._join()
        return Restored(events=tuple(self._joined))

    def _join(self) -> None:
        """Join the token events of each choice, between two events of other kinds."""
        # What was joined last continues, if it is short.
        while self._joined and _is_short(self._joined[-1]):
            self._recent.insert(0, self._joined.pop())
        for is_delta, events in itertools.groupby(self._recent, _is_delta):
            if not is_delta:
                self._joined += events
                continue
            by_choice: dict[int, list[TokenDelta]] = {}
            for event in events:
                assert isinstance(event, TokenDelta)
                by_choice.setdefault(event.choice, []).append(event)
            self._joined += map(_joined, by_choice.values())
        self._recent = []


def _is_delta(event: Kept) -> bool:
    return isinstance(event, TokenDelta)


def _is_short(event: Kept) -> bool:
    return isinstance(event, TokenDelta) and len(event.token_ids) < _MAX_JOINED_TOKENS


def _joined(events: list[TokenDelta]) -> TokenDelta:
    """A single event for consecutive events of a choice and an attempt."""
    if len(events) == 1:
        return events[0]
    counts: list[int] = []
    for event in events:
        if event.token_ids:
            known = event.num_chars[: len(event.token_ids) - 1]
            unknown = (0,) * (len(event.token_ids) - 1 - len(known))
            counts += (*known, *unknown, len(event.text) - sum(known))
        elif counts:
            counts[-1] += len(event.text)
    return replace(
        events[0],
        token_ids=tuple(itertools.chain.from_iterable(event.token_ids for event in events)),
        text="".join([event.text for event in events]),
        num_chars=tuple(counts[:-1]),
        logprobs=tuple(itertools.chain.from_iterable(event.logprobs for event in events)),
    )

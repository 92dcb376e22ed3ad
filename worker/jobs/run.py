"""The run of a job, from its delivery until it is settled, as a state machine without I/O.

The run of a first delivery starts at once. The run of any other delivery first determines where to
continue (`shared.log.writer`): it writes `Started` and waits for the answer of the log's reader; if
there is no reader, it reads the log itself.

Events are published one at a time, in the order in which they were written. An event whose fate is
unknown is published again: readers recognize the repetition by its position in the log, or by its
ticket. The event that ends the answer is chosen once and never replaced.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import TypeAlias

from msgspec import Struct

from shared.errors import (
    BusError,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InternalError,
    QueueDown,
    Unroutable,
    WarrenError,
    WorkerLost,
    from_code,
)
from shared.log import LogWriter, TokenChain
from shared.log.writer import MAX_CRASHES, Attempt, Verdict
from shared.messages import (
    Cancel,
    Completed,
    Continue,
    Failed,
    GenerationJob,
    HandedOver,
    Provenance,
    Replaced,
    ReplyEvent,
    Started,
)
from worker.decode.whole_answer import ChoiceEvent, WholeAnswer

MAX_RETURNS = 8
"""Maximum number of returns of a stream, whatever its log says about crashes. Returns include
hand-overs, lost connections, and workers that crashed before they wrote an event, after the job got
further, or because of another job while this job waited in quarantine. It is well below the
delivery limit of the queues, at which a job is dead-lettered without an answer to its reader."""
LAST_RETURNS = 16
"""From so many returns on, a job that could not be moved out of its queue fails. The returns that
remain until the delivery limit (`shared.topology`) are for publishing that failure, which may take
several attempts."""


class Signal(Enum):
    """Events without data."""

    ADMITTED = auto()
    CONFIRMED = auto()
    """The event was published."""
    UNCONFIRMED = auto()
    """An unexpected error occurred; the event may have been published."""
    UNANSWERED = auto()
    """The position in the log is still unknown after a second."""
    DEADLINE = auto()
    HAND_OVER = auto()
    """Another worker is to continue from the log."""
    SUPERSEDED = auto()
    """A newer delivery of the same job is here."""
    LOG_MOVED = auto()
    """The log was recreated, and the event was not published. This comes in place of a
    confirmation."""
    PEERS_FOUND = auto()
    """There are workers with the numerics of the tokens that the log has."""
    NO_PEERS = auto()


class Planned(Struct, frozen=True):
    """The prompts are valid."""

    num_prompt_tokens: tuple[int, ...] = ()
    prompt_texts: tuple[str, ...] = ()
    provenance: Provenance | None = None
    is_fresh: bool = True
    """Whether work may begin before the broker has confirmed that there is a log."""


class LogRead(Struct, frozen=True):
    """The log from its start, with None for each event that cannot be decoded."""

    events: Iterable[ReplyEvent | None]
    is_renewed: bool = False
    """Whether it is a log that was recreated."""


class Decoded(Struct, frozen=True):
    """The next events of the choices, written by `JobRun.log`."""

    events: Sequence[ChoiceEvent]


class Refused(Struct, frozen=True):
    """The broker refuses the event that is being published."""

    error: BusError


Event: TypeAlias = Signal | Planned | LogRead | Decoded | Refused | Cancel | Continue | WarrenError
"""A command comes from the log's reader, an error from the work."""


class Outcome(Enum):
    """How the job is settled."""

    ANSWERED = auto()
    UNREAD = auto()
    """There is no log, or none any more."""
    SUPERSEDED = auto()
    """Another run has the stream, or its reader has stopped this run before it had a position."""
    HANDED_OVER = auto()
    REQUEUED = auto()
    QUARANTINED = auto()
    MOVED = auto()
    """A worker with other numerics is to continue; see `JobRun.numerics`."""
    REPUBLISHED = auto()
    """The job is to be queued once more, as if it was never returned: it was returned too often,
    but only because connections to the broker were lost, or the node of its log is down."""
    DEAD_LETTERED = auto()
    UNKNOWN = auto()
    """Publishing an event failed twice for unknown reasons."""


class Work(Enum):
    """Actions beside publishing; each ends the work before it."""

    PLAN = auto()
    READ_LOG = auto()
    """Read the log, if it has no reader, and signal ``UNANSWERED`` a second later."""
    FIND_PEERS = auto()
    """Look for workers with the numerics of the tokens; `PEERS_FOUND` or `NO_PEERS` follows."""
    GENERATE = auto()
    """Generate the unfinished choices of `JobRun.log`; `Decoded` follows, at least once."""
    NONE = auto()


class Publish(Struct, frozen=True):
    event: ReplyEvent


class Record(Struct, frozen=True):
    """The request ends here, unless its end is not accepted: record its usage. The fields are
    described in `shared.messages.UsageRecord`.

    The `Publish` that follows may begin at once, but not before the record is under way: once
    readers have the end, they delete the log, and no other worker could determine the usage. The
    job may be settled once the record is confirmed.
    """

    outcome: str
    attempt: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_takeovers: int


class Settle(Struct, frozen=True):
    outcome: Outcome


Action: TypeAlias = Work | Publish | Record | Settle

ENDS = (Outcome.ANSWERED, Outcome.UNREAD, Outcome.DEAD_LETTERED)
"""With these outcomes the request ends, too."""
_ENDINGS = (Started, HandedOver, Failed)
"""The events of a run that ends without an answer."""


class State(Enum):
    PREPARING = auto()
    """Waits for admission, then for the plan of its prompts."""
    OPENING = auto()
    """Waits for the confirmation of `Started`, before any work is done."""
    POSITIONING = auto()
    """Waits for the position in the log from which to continue."""
    CHOOSING = auto()
    """Has the position, and waits to know whether a worker with the right numerics is there."""
    GENERATING = auto()
    ENDING = auto()
    """The last event is written, but not confirmed."""
    SETTLED = auto()


class JobRun:
    """Runs a delivery of ``job``."""

    def __init__(
        self,
        job: GenerationJob,
        *,
        worker: str,
        ticket: str,
        num_returns: int = 0,
        is_suspect: bool = False,
        is_copy: bool = False,
        numerics: str = "",
        requires_same_numerics: bool = False,
        attempt_class: type[Attempt] = Attempt,
    ) -> None:
        """``worker`` is the address for commands, ``ticket`` the fencing token. ``is_copy``: an
        earlier delivery of the job was still running here. ``numerics`` are the worker's;
        ``requires_same_numerics``: it never continues tokens of others."""
        self.state = State.PREPARING
        self._job = job
        self._worker = worker
        self._num_returns = num_returns
        self._is_suspect = is_suspect
        self._numerics = numerics
        self._requires_same_numerics = requires_same_numerics
        self._attempt = attempt_class(
            job.request_id,
            job.total_choices,
            ticket=ticket,
            num_returns=num_returns + is_copy,
            publication=job.publication,
            is_suspect=is_suspect,
            execution=job.execution,
        )
        self._whole = WholeAnswer(job) if job.mode == "final" else None
        self._planned = Planned()
        self._started: Started | None = None
        """The event that opened the attempt in the log; None for jobs of mode ``final``."""
        self._failure: tuple[WarrenError, Outcome] | None = None
        """How the run ends once it has a position in the log."""
        self._outbox: deque[ReplyEvent] = deque()
        """Events that are not confirmed; the first event is being published."""
        self._is_again = False
        """Whether the first event is being published for the second time."""
        self._outcome = Outcome.ANSWERED
        self._has_written = False
        """Whether the broker has confirmed tokens or scores of this run."""

    @property
    def log(self) -> LogWriter:
        """The writer of the choices' events, once the position is known."""
        log = self._attempt.log if self._whole is None else self._whole.log
        assert log is not None, "the position in the log is not known"
        return log

    @property
    def replaced(self) -> Replaced | None:
        """The run that this run continues, if its reader has named it."""
        return self._attempt.replaced

    @property
    def is_contested(self) -> bool:
        """Whether the run is a hedge, and not the log's writer as far as it knows."""
        return self._attempt.is_contested

    @property
    def numerics(self) -> str:
        """The numerics of the tokens that this run continues; empty if there are none, or if they
        are not known."""
        return self._attempt.numerics

    @property
    def changed_numerics(self) -> str:
        """`numerics` if they are known to differ from this run's numerics; otherwise empty."""
        numerics = self.numerics
        return numerics if self._numerics and numerics != self._numerics else ""

    def on(self, event: Event, *, is_settled: bool = True) -> list[Action]:
        """Apply an event; returns the resulting actions in order. Late events have no effect.

        ``is_settled``: every live process has reconnected to the broker; see `shared.bus.base.Bus`.
        """
        match event:
            case Decoded():
                return self._decoded(event.events)
            case Signal.CONFIRMED:
                return self._confirmed()
            case _ if self.state is State.SETTLED:
                return []
            case Signal.UNCONFIRMED:
                return self._unconfirmed()
            case Refused():
                return self._refused(event.error)
            case Signal.LOG_MOVED:
                return self._request_position_again()
            case _ if self.state is State.ENDING:
                return []
            case Signal():
                return self._signalled(event, is_settled=is_settled)
            case Planned():
                self._planned = event
                return self._open() if self._whole is None else self._generate()
            case _:
                return self._learned(event, is_settled=is_settled)

    def _signalled(self, signal: Signal, *, is_settled: bool) -> list[Action]:
        match signal:
            case Signal.ADMITTED:
                return self._admitted(is_settled=is_settled)
            case Signal.UNANSWERED if self._started and self.state is State.POSITIONING:
                # The reader's answer is lost if it arrives while this worker is disconnected.
                return self._write([self._started])
            case Signal.DEADLINE:
                return self._fail(DeadlineExceeded("The request's deadline has passed."))
            case Signal.HAND_OVER:
                return self._hand_over(Outcome.HANDED_OVER)
            case Signal.PEERS_FOUND if self.state is State.CHOOSING:
                return self._hand_over(Outcome.MOVED)
            case Signal.NO_PEERS if self.state is State.CHOOSING:
                return self._generate()
            case Signal.SUPERSEDED:
                return self._settle(Outcome.SUPERSEDED)
            case _:
                return []

    def _learned(
        self, news: LogRead | Cancel | Continue | WarrenError, *, is_settled: bool
    ) -> list[Action]:
        match news:
            case LogRead():
                verdict = self._attempt.read(
                    news.events, is_settled=is_settled, is_renewed=news.is_renewed
                )
                # Nothing remains to be written to a log that has ended, or that a newer run owns.
                if verdict is Verdict.STOP:
                    return self._settle(Outcome.SUPERSEDED)
                return self._follow(verdict)
            case Cancel() | Continue():
                return self._follow(self._attempt.obey(news, is_settled=is_settled))
            case Unroutable():
                return self._settle_unread()
            case EngineFailed():
                # `HandedOver` is left out, so that this run counts as a crash: the request itself
                # may end the engine.
                return self._settle(Outcome.REQUEUED)
            case _:
                return self._fail(news) if self._started else self._fail_in_place(news)

    def _admitted(self, *, is_settled: bool) -> list[Action]:
        # A job of mode ``final`` has no log. In quarantine it is allowed two more returns, because
        # the job that it waits for may crash `MAX_CRASHES` workers before it is quarantined itself,
        # and one more if it generates tokens before.
        limit = MAX_RETURNS if self._whole is None else MAX_CRASHES + 2 * self._is_suspect
        if self._num_returns < limit:
            return [Work.PLAN]
        if self._num_returns >= LAST_RETURNS:
            error = InternalError("The request could not be moved to another queue.")
            return self._fail(error, Outcome.DEAD_LETTERED)
        if not is_settled:
            return self._settle(Outcome.REPUBLISHED)
        if not self._is_suspect:
            return self._hand_over(Outcome.QUARANTINED)
        return self._fail_in_place(_worker_lost(), Outcome.DEAD_LETTERED)

    def _open(self) -> list[Action]:
        """Open a new attempt in the request's log."""
        self._started = self._new_started()
        publishing = self._write([self._started])
        if self._attempt.log is None:
            self.state = State.POSITIONING
        elif self._planned.is_fresh:
            # The engine need not wait for the broker to confirm an event that precedes its tokens.
            return [*publishing, *self._generate()]
        else:
            self.state = State.OPENING
        return publishing

    def _new_started(self) -> Started:
        return Started(
            worker=self._worker,
            ticket=self._attempt.ticket,
            num_prompt_tokens=self._planned.num_prompt_tokens,
            is_waiting=not self._attempt.is_first,
            publication=self._job.publication,
            num_returns=self._num_returns,
            hedge=self._job.hedge,
            is_alone=self._is_suspect,
            num_moves=self._attempt.num_moves,
            execution=self._job.execution,
            numerics=self._numerics,
            context=self._job.context,
            prompt_texts=self._planned.prompt_texts,
            provenance=self._planned.provenance,
        )

    def _generate(self) -> list[Action]:
        self.state = State.GENERATING
        return [Work.GENERATE]

    def _decoded(self, events: Sequence[ChoiceEvent]) -> list[Action]:
        if self.state is not State.GENERATING:
            return []
        is_ended, whole = self.log.is_ended, self._whole
        if whole is None:
            return self._end(Outcome.ANSWERED, events) if is_ended else self._write(events)
        whole.keep(events)
        if not is_ended:
            return []
        completed = whole.completed(self._planned.num_prompt_tokens, self._planned.prompt_texts)
        return self._end(Outcome.ANSWERED, [completed])

    def _follow(self, verdict: Verdict | None) -> list[Action]:
        match verdict:
            case None:
                return []
            case Verdict.CONTINUE if self._failure is not None:
                return self._fail(*self._failure)
            case Verdict.CONTINUE:
                return self._change_numerics() if self.changed_numerics else self._generate()
            case Verdict.STOP:
                # A run that waits for its position may be old, and readers ignore the failure of an
                # old run.
                may_be_old = self.state is State.POSITIONING
                outcome = Outcome.SUPERSEDED if may_be_old else Outcome.ANSWERED
                return self._fail(Cancelled("The request was cancelled."), outcome)
            case Verdict.FOREIGN | Verdict.OUTRUN | Verdict.ENDED:
                is_over = verdict is Verdict.ENDED
                return self._settle(Outcome.ANSWERED if is_over else Outcome.SUPERSEDED)
            case Verdict.REQUEUE:
                return self._hand_over(Outcome.REQUEUED)
            case Verdict.QUARANTINE | Verdict.DEAD_LETTER:
                return self._condemn(verdict)
            case Verdict.FAIL:
                return self._fail(InternalError("The request's log cannot be read."))

    def _condemn(self, verdict: Verdict) -> list[Action]:
        if self._is_beside:
            return self._settle(Outcome.SUPERSEDED)
        if verdict is Verdict.QUARANTINE:
            return self._hand_over(Outcome.QUARANTINED)
        return self._fail(_worker_lost(), Outcome.DEAD_LETTERED)

    def _change_numerics(self) -> list[Action]:
        """Leave the job to a worker with the numerics of its tokens, if such a worker exists. A job
        in quarantine stays, because it must not run beside others."""
        if self._is_beside:
            return self._settle(Outcome.SUPERSEDED)
        if self._is_suspect:
            if self._requires_same_numerics:
                return self._fail(_worker_lost(), Outcome.DEAD_LETTERED)
            return self._generate()
        if self._requires_same_numerics:
            return self._hand_over(Outcome.MOVED)
        self.state = State.CHOOSING
        return [Work.FIND_PEERS]

    def _fail_in_place(
        self, error: WarrenError, outcome: Outcome = Outcome.ANSWERED
    ) -> list[Action]:
        """Fail behind the events that readers have already accepted from other runs."""
        if self._whole is not None or self._attempt.log is not None:
            return self._fail(error, outcome)
        self._failure = error, outcome
        return [Work.NONE, *self._open()]

    @property
    def _is_beside(self) -> bool:
        """Whether this run is a hedge that has written nothing. The run that it hedges is the log's
        writer and has the job, so that this run may end without a word."""
        return self._attempt.is_contested and not self._has_written

    def _fail(self, error: WarrenError, outcome: Outcome = Outcome.ANSWERED) -> list[Action]:
        if self._is_beside:
            return self._settle(Outcome.SUPERSEDED)
        opening: list[ReplyEvent] = []
        if not self._started and self._whole is None and self._attempt.log is None:
            # Readers that have tokens of other runs accept a failure only of a run that started.
            self._started = self._new_started()
            opening.append(self._started)
        return self._end(outcome, [*opening, self._failed(error)])

    def _failed(self, error: WarrenError, *, has_position: bool = True) -> Failed:
        if has_position and self._started and self._attempt.log is not None:
            return self._attempt.log.fail(error.code, error.message, error.param)
        # Without a position in the log, the ticket identifies the run instead.
        ticket = self._started.ticket if self._started else None
        return Failed(
            code=error.code,
            message=error.message,
            param=error.param,
            ticket=ticket,
            execution=self._job.execution,
        )

    def _hand_over(self, outcome: Outcome) -> list[Action]:
        """End with `HandedOver`, so that readers do not count this run as a crash."""
        handed_over = [HandedOver(ticket=self._attempt.ticket)] if self._started else []
        return self._end(outcome, handed_over)

    def _end(self, outcome: Outcome, events: Sequence[ReplyEvent]) -> list[Action]:
        self.state = State.ENDING
        self._outcome = outcome
        publishing = self._write(events)
        return [Work.NONE, *publishing] if self._outbox else self._settle(outcome)

    def _settle(self, outcome: Outcome) -> list[Action]:
        self.state = State.SETTLED
        self._outbox.clear()
        return [Work.NONE, Settle(outcome)]

    def _settle_unread(self) -> list[Action]:
        """The log is gone: the request ended before, or its reader has cancelled it. In the first
        case this record does not count."""
        return [self._record("cancelled", is_read=False), *self._settle(Outcome.UNREAD)]

    def _write(self, events: Sequence[ReplyEvent]) -> list[Action]:
        is_publishing = bool(self._outbox)
        self._outbox.extend(events)
        return [] if is_publishing or not events else self._publish_next()

    def _publish_next(self) -> list[Action]:
        event = self._outbox[0]
        is_end = len(self._outbox) == 1 and self._ends_request
        if not is_end:
            return [Publish(event)]
        outcome = event.code if isinstance(event, Failed) else "completed"
        return [self._record(outcome), Publish(event)]

    @property
    def _ends_request(self) -> bool:
        """Whether the request ends, or may end. A run without a position records attempt 0, which
        replaces no other record."""
        return self.state is State.ENDING and self._outcome in (*ENDS, Outcome.SUPERSEDED)

    def _record(self, outcome: str, *, is_read: bool = True) -> Record:
        log = self._attempt.log if self._whole is None else self._whole.log
        chains = [] if log is None else log.chains
        num_takeovers = self._num_returns + self._job.publication
        # The record of a hedge that fails must not replace the record of the run that it hedges.
        is_doubtful = self._attempt.is_contested and outcome != "completed"
        attempt = 0 if log is None else num_takeovers + 1
        if log is not None and self._whole is None:
            attempt = log.attempt
            num_takeovers = attempt - 1 if self._attempt.is_continued else 0
        return Record(
            outcome=outcome,
            attempt=attempt if is_read and not is_doubtful else 0,
            num_prompt_tokens=sum(self._planned.num_prompt_tokens),
            num_cached_tokens=_num_cached(chains, self._job.num_choices),
            num_output_tokens=sum(len(chain.token_ids) for chain in chains),
            num_takeovers=num_takeovers,
        )

    def _confirmed(self) -> list[Action]:
        if not self._outbox:
            return []
        self._has_written |= not isinstance(self._outbox.popleft(), Started)
        self._is_again = False
        if self._outbox:
            return self._publish_next()
        match self.state:
            case State.GENERATING:
                return []
            case State.OPENING:
                return self._generate()
            case State.POSITIONING:
                return [Work.READ_LOG]
            case State.ENDING:
                return self._settle(self._outcome)
            case _:
                return []

    def _unconfirmed(self) -> list[Action]:
        if self._is_again:
            return self._settle(Outcome.UNKNOWN)
        self._is_again = True
        return [Publish(self._outbox[0])]

    def _request_position_again(self) -> list[Action]:
        """Ask the reader of the log that was recreated where to continue.

        The tokens that it has not read are generated again; it has relayed none of them. The
        prefix cache still holds most of what that takes.
        """
        last = self._outbox[-1]
        self._is_again = False
        has_position = self._started is not None and not isinstance(last, HandedOver | Completed)
        if not has_position:
            while len(self._outbox) > 1 and isinstance(last, HandedOver):
                self._outbox.popleft()
            return [Publish(self._outbox[0])]
        if isinstance(last, Failed):
            self._failure = from_code(last.code, last.message, last.param), self._outcome
        self._outbox.clear()
        self._has_written = False
        self._attempt.forget_place()
        self._started = self._new_started()
        self.state = State.POSITIONING
        return [Work.NONE, *self._write([self._started])]

    def _refused(self, error: BusError) -> list[Action]:
        refused = self._outbox[0]
        is_recorded = self._ends_request and len(self._outbox) == 1
        is_needed = not any(_is_given_up(event) for event in self._outbox)
        self._outbox.clear()
        self._is_again = False
        is_dead_lettered = self._outcome is Outcome.DEAD_LETTERED
        match error:
            # The node of the log is down: the job waits in its queue until the node returns, unless
            # it is to be dead-lettered, because it would be queued as if it was never returned.
            case QueueDown() if is_needed and not is_dead_lettered:
                return self._settle(Outcome.REPUBLISHED)
            # Nobody reads.
            case Unroutable() | QueueDown():
                return self._settle(Outcome.UNREAD) if is_recorded else self._settle_unread()
            # The end itself is refused.
            case _ if self.state is State.ENDING and isinstance(refused, _ENDINGS):
                record = [] if is_recorded else [self._record(error.code, is_read=False)]
                return [*record, *self._settle(Outcome.DEAD_LETTERED)]
            # The run fails, without an attempt in the log.
            case _ if refused is self._started:
                self._started = None
                return self._fail(error)
            case _ if self._is_beside:
                return self._settle(Outcome.SUPERSEDED)
            # `log` is already past the refused event, a position that no reader will have.
            case _:
                return self._end(Outcome.ANSWERED, [self._failed(error, has_position=False)])


def _num_cached(chains: Sequence[TokenChain], num_choices: int) -> int:
    """The cached tokens of all prompts. Later choices of a prompt find the tokens that its first
    choice has computed, so the smallest number is the prompt's."""
    of_prompts = (chains[k : k + num_choices] for k in range(0, len(chains), num_choices))
    return sum(
        min((chain.num_cached_tokens for chain in choices if chain.is_finished), default=0)
        for choices in of_prompts
    )


def _is_given_up(event: ReplyEvent) -> bool:
    """Whether the event ends a request whose answer is no longer needed."""
    return isinstance(event, Failed) and event.code in (Cancelled.code, DeadlineExceeded.code)


def _worker_lost() -> WorkerLost:
    return WorkerLost("The request crashed the workers that ran it.")

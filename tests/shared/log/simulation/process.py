"""A worker's process: drives the `JobRun`s of a real worker by chance instead of by a clock."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from shared.errors import Unroutable
from shared.messages import Cancel, Continue, GenerationJob, ReplyEvent, Started, TokenPrompt
from tests.shared.log.simulation.broker import Broker, Job
from tests.shared.log.simulation.model import Model
from worker.jobs.run import (
    Decoded,
    Event,
    JobRun,
    LogRead,
    Outcome,
    Planned,
    Publish,
    Record,
    Refused,
    Settle,
    Signal,
    Work,
)

_BLIND_SHARE = 0.5
"""How often a worker does not look where the log went on before it writes."""
_UNCONFIRMED_SHARE = 0.3
"""Of the jobs that are published in place of others."""
NUM_CACHED = 1
"""Tokens of each choice's prompt that are found in a prefix cache: all of them."""
_MAX_GIVEN_AT_ONCE = 4
"""Given tokens in an event."""
_MAX_COMPANIONS = 8
"""Any of them may take the worker with it: to the suspect that is a worker's death like others."""


class Crash(Exception):
    """The job took its worker with it."""


@dataclass(eq=False)
class Delivery:
    """A job in a worker's hands, and what its run has asked for."""

    job: Job
    run: JobRun
    num_waits: int
    """The other jobs of a suspect's worker, which have to end before the suspect is admitted."""
    work: Work = Work.NONE
    publishing: deque[ReplyEvent] = field(default_factory=deque)
    """The event that is not confirmed yet, if any."""
    record: Record | None = None
    """What the broker has not received yet."""
    outcome: Outcome | None = None
    is_lost: bool = False
    """Whether the broker has given the job to somebody else."""
    has_started: bool = False
    num_renewals: int = 0
    """Into which queue of the log it writes."""

    @property
    def is_alone(self) -> bool:
        return self.job.is_suspect and self.has_started


class Process:
    """Takes jobs in sequence, and writes what the model says at its position of the log."""

    def __init__(
        self, name: str, broker: Broker, model: Model, dice: random.Random, numerics: str = ""
    ) -> None:
        self.name = name
        self.numerics = numerics
        self.deliveries: list[Delivery] = []
        self.is_paused = False
        self.is_connected = True
        """False: its deliveries went back, and it has not noticed yet."""
        self._broker = broker
        self._model = model
        self._dice = dice
        self._num_tickets = 0
        broker.commands[name] = deque()
        broker.numerics.append(numerics)

    @property
    def unconfirmed(self) -> list[ReplyEvent]:
        return [event for delivery in self.deliveries for event in delivery.publishing]

    def moves(self) -> list[Callable[[], None]]:
        """All that it could do next."""
        if self.is_paused:
            return []
        moves: list[Callable[[], None]] = []
        if not self.is_connected:
            moves.append(self.notice)
        job = self._broker.may_take(self.name, self.numerics)
        if self.is_connected and not self.deliveries and job is not None:
            moves.append(partial(self.take, job))
        if self._broker.commands[self.name]:
            moves.append(self.obey)
        for delivery in self.deliveries:
            moves += self._moves_of(delivery)
            if delivery.outcome is None and self._model.expires(self._dice):
                moves.append(partial(self._tell, delivery, Signal.DEADLINE))
        return moves

    def take(self, job: Job) -> None:
        self._broker.jobs.remove(job)
        self._num_tickets += 1
        run = JobRun(
            GenerationJob(
                request_id="r",
                model="m",
                prompts=(TokenPrompt(token_ids=(1,)),),
                num_choices=self._model.num_choices,
                mode="stream",
                publication=job.publication,
                hedge=job.hedge,
                execution=self._model.execution_of(is_left=job.is_left),
                given_ids=() if job.is_left else self._model.given_ids,
            ),
            worker=self.name,
            ticket=f"{self.name}-{self._num_tickets}",
            num_returns=job.num_returns,
            is_suspect=job.is_suspect,
            numerics=self.numerics,
            requires_same_numerics=self._model.requires_same_numerics,
            attempt_class=self._model.attempt_class,
        )
        num_waits = self._dice.randint(0, _MAX_COMPANIONS) if job.is_suspect else 0
        delivery = Delivery(job, run, num_waits, num_renewals=job.num_renewals)
        self.deliveries.append(delivery)
        if not num_waits:
            self._tell(delivery, Signal.ADMITTED)

    def obey(self) -> None:
        command = self._broker.commands[self.name].popleft()
        assert isinstance(command, Cancel | Continue)
        for delivery in self.deliveries:
            self._tell(delivery, command)

    def drain(self) -> None:
        """Hand over what runs."""
        for delivery in self.deliveries:
            self._tell(delivery, Signal.HAND_OVER)

    def stumble(self) -> None:
        """An error that nobody foresaw, while an event is published."""
        for delivery in self.deliveries:
            if delivery.publishing:
                self._write_some(delivery, self._dice.randint(0, 1))
                self._tell(delivery, Signal.UNCONFIRMED)

    def cut_off(self, *, is_counted: bool = True) -> None:
        """The broker takes it for dead and gives its jobs to others."""
        if self.is_connected:
            self.is_connected = False
            self._broker.commands[self.name].clear()
            for delivery in reversed(self.deliveries):
                self._lose(delivery, is_counted=is_counted)

    def _lose(self, delivery: Delivery, *, is_counted: bool = True) -> None:
        if not delivery.is_lost:
            delivery.is_lost = True
            self._note_loss(delivery)
            self._broker.give_back(delivery.job, is_counted=is_counted)

    def _note_loss(self, delivery: Delivery) -> None:
        if delivery.is_alone and delivery.is_lost:
            self._broker.lost_alone.add(delivery.job.publication)

    def miss_commands(self) -> None:
        """The commands on their way are lost with their connection, and the deliveries of the
        process come back to it before anybody else has them."""
        self._broker.commands[self.name].clear()

    def notice(self) -> None:
        """Learn that the connection is gone, and that its jobs belong to others now."""
        self.is_connected = True
        self.drain()

    def die(self) -> None:
        """What was under way may still arrive."""
        for delivery in self.deliveries:
            self._write_some(delivery, self._dice.randint(0, 1))
            if self._broker.side_dice.randint(0, 1):
                self._send_record(delivery)
        self.cut_off()
        self.deliveries.clear()
        del self._broker.commands[self.name]
        self._broker.numerics.remove(self.numerics)

    def repeat(self) -> None:
        """An event arrives whose confirmation does not: it will be sent again."""
        for delivery in self.deliveries:
            self._write_some(delivery, 1)

    def _write_some(self, delivery: Delivery, num_events: int) -> None:
        if num_events and delivery.publishing and self._model.records_first:
            self._send_record(delivery)
        if self._is_current(delivery) and not self._broker.is_down:
            for event in list(delivery.publishing)[:num_events]:
                self._broker.append(event)

    def _send_record(self, delivery: Delivery) -> None:
        """Records precede the event that ends their request, and nobody takes them back."""
        if delivery.record is not None and not delivery.job.is_left:
            self._broker.records.append(delivery.record)
            delivery.record = None

    def _is_current(self, delivery: Delivery) -> bool:
        return delivery.num_renewals == self._broker.num_renewals

    def _tell(self, delivery: Delivery, event: Event) -> None:
        for action in delivery.run.on(event):
            match action:
                case Publish():
                    self._publish(delivery, action.event)
                case Record():
                    delivery.record = action
                case Settle():
                    self._settle(delivery, action.outcome)
                case _:
                    delivery.work = action
        if delivery.work is Work.PLAN:  # takes no time
            delivery.work = Work.NONE
            is_fresh = self._dice.random() < self._model.fresh_share
            self._tell(delivery, Planned((1,), is_fresh=is_fresh))

    def _publish(self, delivery: Delivery, event: ReplyEvent) -> None:
        delivery.publishing = deque([event])
        if isinstance(event, Started) and not delivery.has_started:
            delivery.has_started = True
            self._note_loss(delivery)

    def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        delivery.outcome = outcome
        delivery.publishing.clear()

    def _moves_of(self, delivery: Delivery) -> list[Callable[[], None]]:
        if delivery.outcome is not None:
            is_decided = self.is_connected or not delivery.is_lost
            return [partial(self._end, delivery, delivery.outcome)] if is_decided else []
        if delivery.publishing and self._is_current(delivery) and self._broker.is_down:
            return []
        if delivery.publishing:
            return [partial(self._confirm, delivery)]
        if delivery.num_waits:
            return [partial(self._wait, delivery)]
        if delivery.work is Work.GENERATE:
            return [partial(self._generate, delivery)]
        if delivery.work is Work.FIND_PEERS:
            has_peers = delivery.run.numerics in self._broker.numerics
            signal = Signal.PEERS_FOUND if has_peers else Signal.NO_PEERS
            return [partial(self._tell, delivery, signal)]
        if delivery.work is Work.READ_LOG and self._broker.reader is None:
            return [partial(self._read, delivery)]
        if delivery.work is Work.READ_LOG and not self._broker.commands[self.name]:
            return [partial(self._tell, delivery, Signal.UNANSWERED)]
        return []

    def _end(self, delivery: Delivery, outcome: Outcome) -> None:
        self.deliveries.remove(delivery)
        self._send_record(delivery)
        if delivery.is_lost:
            return
        match outcome:
            case Outcome.HANDED_OVER | Outcome.REQUEUED:
                self._broker.give_back(delivery.job)
            case Outcome.UNKNOWN:
                self._lose(delivery)
            case Outcome.QUARANTINED:
                again = Job(
                    is_left=delivery.job.is_left,
                    hedge=delivery.job.hedge,
                    publication=delivery.job.publication + 1,
                    is_suspect=True,
                    num_renewals=delivery.job.num_renewals,
                )
                self._publish_again(delivery, again)
            case Outcome.MOVED:
                again = Job(
                    is_left=delivery.job.is_left,
                    hedge=delivery.job.hedge,
                    publication=delivery.job.publication + 1,
                    num_renewals=delivery.job.num_renewals,
                    numerics=delivery.run.numerics,
                )
                self._publish_again(delivery, again)
            case Outcome.DEAD_LETTERED if not delivery.job.is_left:
                suspects = self._broker.lost_alone | self._broker.copied
                is_guilty = delivery.job.publication in suspects
                assert is_guilty or delivery.run.changed_numerics, "innocent"

    def _publish_again(self, delivery: Delivery, again: Job) -> None:
        """Publish a job in place of the job in hand, which comes back if the confirmation is lost,
        and is then published again in the same way."""
        self._broker.jobs.append(again)
        if self._broker.side_dice.random() < _UNCONFIRMED_SHARE:
            self._broker.copied.add(again.publication)
            self._broker.give_back(delivery.job)

    def _confirm(self, delivery: Delivery) -> None:
        if self._model.records_first:
            self._send_record(delivery)
        event = delivery.publishing.popleft()
        if self._broker.log is not None and not self._is_current(delivery):
            return self._write_elsewhere(delivery)
        refusal = Refused(Unroutable("nobody is left to read"))
        is_routed = self._broker.append(event)
        self._tell(delivery, Signal.CONFIRMED if is_routed else refusal)
        return None

    def _write_elsewhere(self, delivery: Delivery) -> None:
        """An event for a queue of the log that nobody reads any more."""
        if self._broker.is_back and self._dice.random() < _BLIND_SHARE:
            return self._tell(delivery, Signal.CONFIRMED)
        delivery.num_renewals = self._broker.num_renewals
        return self._tell(delivery, Signal.LOG_MOVED)

    def _wait(self, delivery: Delivery) -> None:
        """One of the worker's other jobs has ended."""
        delivery.num_waits -= 1
        if not delivery.num_waits:
            self._tell(delivery, Signal.ADMITTED)

    def _read(self, delivery: Delivery) -> None:
        log = self._broker.log
        if log is None:
            return self._tell(delivery, Unroutable("the log is gone"))
        if self._is_current(delivery) and not self._broker.is_down:
            is_renewed = self._broker.num_renewals > 0
            self._tell(delivery, LogRead(tuple(log), is_renewed=is_renewed))
        if delivery.work is Work.READ_LOG:
            self._tell(delivery, Signal.UNANSWERED)
        return None

    def _generate(self, delivery: Delivery) -> None:
        log = delivery.run.log
        if given := self._given(delivery):
            choice, token_ids = given
            text = self._model.text(token_ids)
            return self._tell(delivery, Decoded([log.delta(choice, token_ids, text)]))
        choice, chain = next((k, c) for k, c in enumerate(log.chains) if not c.is_finished)
        if self._model.is_deadly(chain.token_ids):
            raise Crash
        token_ids = self._model.next_tokens(
            chain.token_ids, self._dice, self.numerics, is_left=delivery.job.is_left
        )
        text = self._model.text(token_ids)
        is_last = self._model.is_complete(chain.token_ids, token_ids)
        return self._tell(
            delivery,
            Decoded(
                [
                    log.finish(choice, token_ids, text, "length", num_cached_tokens=NUM_CACHED)
                    if is_last
                    else log.delta(choice, token_ids, text)
                ]
            ),
        )

    def _given(self, delivery: Delivery) -> tuple[int, Sequence[int]] | None:
        """The next of the given tokens, and their choice. A run writes those of all choices before
        it generates."""
        given_ids = () if delivery.job.is_left else self._model.given_ids
        if not given_ids:
            return None
        log = delivery.run.log
        for choice, chain in enumerate(log.chains):
            missing = () if chain.is_finished else self._model.missing(log, choice, given_ids)
            if missing:
                return choice, missing[: self._dice.randint(1, _MAX_GIVEN_AT_ONCE)]
        return None

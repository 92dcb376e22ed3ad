"""A worker, as far as it matters to the rules of the log."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from shared.log import LogWriter
from shared.log.attempt import Attempt, Verdict
from shared.messages import Cancel, Continue, Failed, HandedOver, ReplyEvent, Started
from tests.shared.log.simulation.broker import Broker, Job
from tests.shared.log.simulation.model import Model

_MAX_COMPANIONS = 8
"""Any of them may kill the worker. For the suspect, that counts like any other death of its
worker."""


class Crash(Exception):
    """The job killed its worker."""


@dataclass(eq=False)
class Run:
    """One delivery that a worker holds."""

    job: Job
    attempt: Attempt
    started: Started
    num_waits: int = 0
    """For a suspect: the worker's other jobs, which must end before it starts."""
    outbox: deque[ReplyEvent] = field(default_factory=deque)
    """Events that were written but not confirmed yet, in order."""
    settle: Callable[[], None] | None = None
    """How the delivery is settled once all events are confirmed."""

    @property
    def has_begun(self) -> bool:
        return not self.num_waits

    @property
    def is_alone(self) -> bool:
        return self.job.is_suspect and self.has_begun


class Worker:
    """Takes one job at a time, and writes the model's tokens at its position of the log."""

    def __init__(self, name: str, broker: Broker, model: Model, dice: random.Random) -> None:
        self.name = name
        self.runs: list[Run] = []
        self.is_paused = False
        self.is_connected = True
        """False if its deliveries were returned without its knowledge."""
        self._broker = broker
        self._model = model
        self._dice = dice
        self._num_tickets = 0
        broker.commands[name] = deque()

    def moves(self) -> list[Callable[[], None]]:
        """All moves that are possible next."""
        if self.is_paused:
            return []
        moves: list[Callable[[], None]] = []
        if not self.is_connected:
            moves.append(self.notice)
        if self.is_connected and not self.runs and self._broker.jobs:
            moves.append(self.take)
        if self._broker.commands[self.name]:
            moves.append(self.obey)
        for run in self.runs:
            moves += self._moves_of(run)
            if run.settle is None and self._model.expires(self._dice):
                moves.append(partial(self._expire, run))
        return moves

    def take(self) -> None:
        job = self._broker.jobs.pop(0)
        self._num_tickets += 1
        attempt = self._model.attempt_class(
            "r",
            self._model.num_choices,
            ticket=f"{self.name}-{self._num_tickets}",
            num_returns=job.num_returns,
            publication=job.publication,
            is_suspect=job.is_suspect,
        )
        started = Started(
            worker=self.name,
            ticket=attempt.ticket,
            num_prompt_tokens=(1,),
            is_waiting=not attempt.is_first,
            publication=job.publication,
            num_returns=job.num_returns,
            is_alone=job.is_suspect,
        )
        num_waits = self._dice.randint(0, _MAX_COMPANIONS) if job.is_suspect else 0
        run = Run(job, attempt, started, num_waits)
        self.runs.append(run)
        if run.has_begun:
            self._begin(run)

    def obey(self) -> None:
        command = self._broker.commands[self.name].popleft()
        for run in self.runs:
            if run.settle is None and isinstance(command, Cancel | Continue):
                self._follow(run, run.attempt.obey(command))

    def drain(self) -> None:
        """Hand over the running jobs."""
        for run in self.runs:
            if run.settle is None:
                self._say_handed_over(run)
                run.settle = partial(self._broker.give_back, run.job)

    def cut_off(self, *, is_counted: bool = True) -> None:
        """The broker considers it dead and gives its jobs to others."""
        if self.is_connected:
            self.is_connected = False
            self._broker.commands[self.name].clear()
            for run in reversed(self.runs):
                run.job.num_lost_alone += run.is_alone
                self._broker.give_back(run.job, is_counted=is_counted)

    def miss_commands(self) -> None:
        """Commands on their way are lost with the connection, and its deliveries are returned
        before others receive them."""
        self._broker.commands[self.name].clear()

    def notice(self) -> None:
        """Notice that the connection is gone, and drop its jobs, which others hold now."""
        for run in self.runs:
            run.outbox.clear()
            self._say_handed_over(run)
            self._write_some(run, len(run.outbox))
        self.runs.clear()
        self.is_connected = True

    def die(self) -> None:
        """Some of the events that are under way still arrive."""
        for run in self.runs:
            self._write_some(run, self._dice.randint(0, len(run.outbox)))
        self.cut_off()
        self.runs.clear()
        del self._broker.commands[self.name]

    def repeat(self) -> None:
        """An event arrives but its confirmation does not, so that it will be sent again."""
        for run in self.runs:
            if run.outbox:
                self._broker.append(run.outbox[0])

    def _begin(self, run: Run) -> None:
        run.outbox.append(run.started)
        run.job.num_lost_alone += run.is_alone and not self.is_connected

    def _wait(self, run: Run) -> None:
        """One of the worker's other jobs has ended."""
        run.num_waits -= 1
        if run.has_begun:
            self._begin(run)

    def _say_handed_over(self, run: Run) -> None:
        if run.has_begun:
            run.outbox.append(HandedOver(ticket=run.attempt.ticket))

    def _write_some(self, run: Run, num_events: int) -> None:
        for _ in range(num_events):
            self._broker.append(run.outbox.popleft())

    def _moves_of(self, run: Run) -> list[Callable[[], None]]:
        if run.outbox:
            return [lambda: self._write(run)] + ([] if run.settle else self._going_on(run))
        if run.settle is not None:
            return [lambda: self._settle(run)] if self.is_connected else []
        if not run.has_begun:
            return [lambda: self._wait(run)]
        return self._going_on(run)

    def _going_on(self, run: Run) -> list[Callable[[], None]]:
        if run.attempt.log is not None:
            return [lambda: self._generate(run, self._log_of(run))]
        if run.outbox:
            return []
        if self._broker.reader is None:
            return [lambda: self._read(run)]
        return [] if self._broker.commands[self.name] else [lambda: self._ask_again(run)]

    def _log_of(self, run: Run) -> LogWriter:
        assert run.attempt.log is not None
        return run.attempt.log

    def _write(self, run: Run) -> None:
        if not self._broker.append(run.outbox.popleft()):  # nothing remains to be read
            run.outbox.clear()
            run.settle = run.settle or (lambda: None)

    def _settle(self, run: Run) -> None:
        assert run.settle is not None
        self.runs.remove(run)
        run.settle()

    def _read(self, run: Run) -> None:
        log = self._broker.log
        self._follow(run, Verdict.STOP if log is None else run.attempt.read(log))

    def _expire(self, run: Run) -> None:
        """The deadline passes, in any state."""
        if not run.has_begun:
            run.num_waits = 0
            self._begin(run)
        log = run.attempt.log
        if log is None:
            ticket = run.attempt.ticket
            run.outbox.append(Failed(code="deadline_exceeded", message="", ticket=ticket))
        elif not log.is_ended:
            run.outbox.append(log.fail("deadline_exceeded", ""))
        run.settle = lambda: None

    def _ask_again(self, run: Run) -> None:
        """The reader's answer may have been lost."""
        run.outbox.append(run.started)

    def _generate(self, run: Run, log: LogWriter) -> None:
        choice = next((k for k, chain in enumerate(log.chains) if not chain.is_finished), None)
        if choice is None:
            run.settle = lambda: None
            return
        if self._model.is_deadly(log.chains[choice].token_ids):
            raise Crash
        token_ids = self._model.next_tokens(log.chains[choice].token_ids, self._dice)
        text = self._model.text(token_ids)
        is_last = self._model.is_complete(log.chains[choice].token_ids, token_ids)
        run.outbox.append(
            log.finish(choice, token_ids, text, "length")
            if is_last
            else log.delta(choice, token_ids, text)
        )

    def _follow(self, run: Run, verdict: Verdict | None) -> None:
        log = run.attempt.log
        if verdict in (None, Verdict.GO_ON):
            return
        if verdict is Verdict.QUARANTINE and log is not None:
            self._say_handed_over(run)
            run.settle = lambda: self._broker.jobs.append(
                Job(publication=run.job.publication + 1, is_suspect=True)
            )
        elif verdict is Verdict.BURY and log is not None:
            assert run.job.num_lost_alone, "innocent"
            if not log.is_ended:
                run.outbox.append(log.fail("worker_lost", "it crashed every worker"))
            run.settle = lambda: None
        elif verdict is Verdict.GIVE_BACK:
            run.outbox.clear()
            self._say_handed_over(run)
            run.settle = lambda: self._broker.give_back(run.job)
        else:
            run.outbox.clear()
            run.settle = lambda: None

"""How many jobs end before their deadlines, by the order in which a worker begins them.

The jobs of a tenant arrive at random, and the worker begins them first come, first served, or by
their deadlines, as workers do (`worker.jobs.line`, `worker.jobs.pace`). The engine runs in
simulated time with about the times of SmolLM2's steps on two cores, so the figures do not depend on
the machine.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from bench.report import console
from shared.messages import GenerationJob, SamplingParams, TokenPrompt
from tests.worker.engine.simulation import Device
from worker.engine.engine import Engine
from worker.engine.interface import CancelSequence, EngineCommand, SequenceId, StepOutput, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.jobs.line import WaitingLine
from worker.jobs.pace import JobPace

LOADS = (0.8, 1.0, 1.2)
_NUM_SLOTS = 16
_STEP_TOKENS = 512
_PROMPT_TOKENS = (32, 256)
_ANSWER_TOKENS = (16, 256)
_TIMES = (1.2, 6.0)
"""The deadline of a job, relative to what the job takes while all slots are in use."""
_FULL_TOKEN_S = 0.016
_FULL_PROMPT_S = 0.1


@dataclass(frozen=True, eq=False)
class Arrival:
    at: float
    deadline: float
    job: GenerationJob


@dataclass(frozen=True, kw_only=True)
class InTime:
    """A load that is served in one order."""

    load: float
    """Relative to what the worker can serve."""
    order: str
    num_jobs: int
    in_time: float
    """The share of the jobs that ended before their deadlines."""
    wasted: float
    """The share of the output tokens that belong to other jobs."""


def measure(num_jobs: int) -> list[InTime]:
    """Each load in both orders."""
    capacity = _capacity(num_jobs // 4)
    rows = []
    for load in LOADS:
        arrivals = list(_arrivals(num_jobs, load * capacity))
        for order, by_deadline in (("of arrival", False), ("by deadline", True)):
            service = _Service(arrivals, by_deadline=by_deadline)
            service.run()
            rows.append(
                InTime(
                    load=load,
                    order=order,
                    num_jobs=num_jobs,
                    in_time=service.num_in_time / num_jobs,
                    wasted=1 - service.num_useful_tokens / service.num_tokens,
                )
            )
    return rows


def _arrivals(num_jobs: int, rate: float) -> Iterator[Arrival]:
    """A Poisson process of ``rate`` jobs a second."""
    draw = random.Random(0)
    at = 0.0
    for k in range(num_jobs):
        at += draw.expovariate(rate)
        num_tokens = draw.randint(*_ANSWER_TOKENS)
        takes_s = _FULL_PROMPT_S + _FULL_TOKEN_S * num_tokens
        prompt = TokenPrompt(
            token_ids=tuple(draw.choices(range(1 << 16), k=draw.randint(*_PROMPT_TOKENS)))
        )
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        job = GenerationJob(request_id=str(k), model="m", prompts=(prompt,), sampling=sampling)
        yield Arrival(at, at + draw.uniform(*_TIMES) * takes_s, job)


def _capacity(num_jobs: int) -> float:
    """The jobs a second that the worker serves while all slots are in use."""
    arrivals = [replace(one, at=0.0, deadline=1e9) for one in _arrivals(num_jobs, 1.0)]
    service = _Service(arrivals, by_deadline=False)
    service.run()
    return num_jobs / service.now


class _Service:
    """A worker that serves the arrivals."""

    def __init__(self, arrivals: Sequence[Arrival], *, by_deadline: bool) -> None:
        self.num_in_time = self.num_tokens = self.num_useful_tokens = 0
        self._by_deadline = by_deadline
        self._coming = list(reversed(arrivals))
        self._device = Device(num_blocks=4096)
        self._engine = Engine(
            self._device, SchedulerLimits(_NUM_SLOTS, _STEP_TOKENS), clock=lambda: self.now
        )
        self._line: WaitingLine[Arrival] = WaitingLine()
        self._pace = JobPace()
        self._running: dict[SequenceId, _Run] = {}

    @property
    def now(self) -> float:
        return self._device.now

    def run(self) -> None:
        """Serve all arrivals."""
        while self._coming or self._line or self._running:
            if not self._line and not self._running:
                self._device.now = max(self.now, self._coming[-1].at)
            self._arrive()
            commands = [*self._cancelled(), *self._begun()]
            if self._engine.has_work or commands:
                for output in self._engine.step(commands):
                    assert isinstance(output, StepOutput)
                    self._receive(output)

    def _arrive(self) -> None:
        while self._coming and self._coming[-1].at <= self.now:
            arrival = self._coming.pop()
            by = arrival.deadline - self._pace.expected_s(arrival.job)
            self._line.add(arrival, by if self._by_deadline else None)

    def _cancelled(self) -> Iterator[EngineCommand]:
        """End the jobs whose deadlines have passed, and the jobs that are hopeless."""
        for sequence_id, run in list(self._running.items()):
            if run.arrival.deadline <= self.now:
                del self._running[sequence_id]
                yield CancelSequence(sequence_id)
        for arrival in list(self._line):
            least_s = self._pace.least_s(arrival.job) if self._by_deadline else 0.0
            if arrival.deadline - self.now <= least_s:
                self._line.remove(arrival)

    def _begun(self) -> Iterator[EngineCommand]:
        while self._line and len(self._running) < _NUM_SLOTS:
            arrival = self._line.first(self.now)
            self._line.remove(arrival)
            job = arrival.job
            (prompt,) = job.prompts
            assert isinstance(prompt, TokenPrompt)
            assert job.sampling.max_tokens is not None
            sequence_id = SequenceId(job.request_id, 0)
            self._running[sequence_id] = _Run(arrival, self.now)
            yield Submit(sequence_id, prompt.token_ids, job.sampling, 0, job.sampling.max_tokens)

    def _receive(self, output: StepOutput) -> None:
        self.num_tokens += 1
        run = self._running.get(output.sequence_id)
        if run is None:
            return
        if run.first_at is None:
            run.first_at = self.now
            (prompt,) = run.arrival.job.prompts
            assert isinstance(prompt, TokenPrompt)
            self._pace.learn_prompt(len(prompt.token_ids), self.now - run.began_at)
        if output.finish_reason is None:
            return
        del self._running[output.sequence_id]
        num_tokens = run.arrival.job.sampling.max_tokens or 0
        self._pace.learn_answer(num_tokens, self.now - run.first_at)
        if self.now <= run.arrival.deadline:
            self.num_in_time += 1
            self.num_useful_tokens += num_tokens


@dataclass
class _Run:
    arrival: Arrival
    began_at: float
    first_at: float | None = None


def show(rows: Sequence[InTime]) -> None:
    table = Table("load", "order", title="Jobs that end before their deadlines, in simulated time")
    percent: Callable[[float], str] = "{:.0%}".format
    for heading in ("in time", "tokens wasted"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(f"{row.load:g}", row.order, percent(row.in_time), percent(row.wasted))
    console().print(table)

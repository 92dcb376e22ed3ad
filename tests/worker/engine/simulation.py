"""A device whose steps take the time given by a formula, on a simulated clock."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from worker.engine.cache.layout import ONE_FULL, CacheGroup
from worker.engine.engine import Engine
from worker.engine.interface import ScheduledBatch, SequenceId, StepScores, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.engine.step_cost import StepWork

StepSeconds = Callable[[StepWork], float]


def work_of(batch: ScheduledBatch) -> StepWork:
    work = StepWork()
    for share in batch.sequences:
        work.add(share.start, share.num_tokens)
    return work


def two_cores(work: StepWork) -> float:
    """About the times of SmolLM2-135M in bfloat16 on two cores, in seconds."""
    return (
        0.010
        + 0.30e-3 * work.num_prompt_tokens
        + 0.10e-6 * work.num_prompt_pairs
        + 0.25e-3 * work.num_decodes
        + 1.5e-6 * work.num_decode_pairs
    )


@dataclass
class Device:
    """A `ModelRunner` that draws token 0 and takes ``step_s`` for each step, in sequence."""

    num_blocks: int
    step_s: StepSeconds = two_cores
    block_size: int = 16
    groups: Sequence[CacheGroup] = ONE_FULL
    vocab_size: int = 1 << 16
    max_seq_len: int = 1 << 20
    now: float = 0.0
    is_free_at: float = 0.0
    works: list[StepWork] = field(default_factory=list)

    def launch(self, batch: ScheduledBatch) -> "_Step":
        work = work_of(batch)
        self.works.append(work)
        self.is_free_at = max(self.is_free_at, self.now) + self.step_s(work)
        num_rows = sum(1 + share.num_drafts for share in batch.sequences if share.is_sampled)
        return _Step(self, self.is_free_at, [0] * num_rows)

    def close(self) -> None:
        """Nothing to release."""


@dataclass
class _Step:
    device: Device
    done_at: float
    token_ids: list[int]

    def result(self) -> list[int]:
        self.device.now = max(self.device.now, self.done_at)
        return self.token_ids

    def scores(self) -> StepScores:
        return StepScores({}, ())


@dataclass
class Streams:
    """When each sequence was submitted and when its tokens came, in seconds of the device's
    clock."""

    sent_at: dict[SequenceId, float] = field(default_factory=dict)
    token_at: dict[SequenceId, list[float]] = field(default_factory=dict)
    max_num_held: int = 0
    """The maximum number of blocks in use."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_at.values()))

    @property
    def pauses_s(self) -> list[float]:
        """The times between consecutive tokens of a sequence, the shortest first."""
        return sorted(
            after - before for times in self.token_at.values() for before, after in pairwise(times)
        )

    def first_token_s(self, sequence_id: SequenceId) -> float:
        return self.token_at[sequence_id][0] - self.sent_at[sequence_id]


def serve(
    device: Device, limits: SchedulerLimits, submits: Iterable[Submit], num_users: int
) -> tuple[Engine, Streams]:
    """Let each user send the next submit whenever the previous submit has ended."""
    engine = Engine(device, limits, clock=lambda: device.now)
    streams = Streams()
    coming = iter(submits)
    sent = _send(coming, num_users, streams, device.now)
    while sent or engine.has_work:
        outputs = engine.step(sent)
        load = engine.load()
        streams.max_num_held = max(streams.max_num_held, load.num_blocks - load.num_free_blocks)
        for output in outputs:
            streams.token_at[output.sequence_id].append(device.now)
        num_ended = sum(output.finish_reason is not None for output in outputs)
        sent = _send(coming, num_ended, streams, device.now)
    return engine, streams


def _send(coming: Iterator[Submit], count: int, streams: Streams, now: float) -> list[Submit]:
    sent = [submit for _, submit in zip(range(count), coming, strict=False)]
    for submit in sent:
        streams.sent_at[submit.sequence_id] = now
        streams.token_at[submit.sequence_id] = []
    return sent

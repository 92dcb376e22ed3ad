"""The whole engine, with requests of mixed lengths that are all submitted at the start."""

import time
from dataclasses import dataclass

from bench.gpu.requests import GpuRequest
from bench.gpu.scale import Scale
from bench.gpu.steps import GREEDY
from worker.engine.engine import Engine
from worker.engine.interface import ScheduledBatch, SequenceId, StepHandle, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.runner import TorchRunner


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """The result of running all requests on a system."""

    seconds: float
    num_outputs: int
    num_prompt_tokens: int
    num_steps: int = 0
    unused_slots: float = 0.0
    """The share of unused slots among the blocks in the steps' tables."""
    num_preemptions: int = 0

    @property
    def outputs_per_s(self) -> float:
        return self.num_outputs / self.seconds


class _Watched:
    """A `ModelRunner` that counts slots and passes steps on."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self.block_size = runner.block_size
        self.groups = runner.groups
        self.num_blocks = runner.num_blocks
        self.vocab_size = runner.vocab_size
        self.max_seq_len = runner.max_seq_len
        self.num_steps = self.num_slots = self.num_used = 0

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        self.num_steps += 1
        for share in batch.sequences:
            self.num_slots += len(share.block_tables[0]) * self.block_size
            self.num_used += share.start + share.num_tokens
        return self._runner.launch(batch)

    def close(self) -> None:
        """Keep the runner open, because it is used again."""


def run(scale: Scale, runner: TorchRunner, requests: list[GpuRequest]) -> WholeRun:
    """Run all requests on our engine, after a short run that is not counted."""
    _run(scale, runner, requests[:2])
    return _run(scale, runner, requests)


def _run(scale: Scale, runner: TorchRunner, requests: list[GpuRequest]) -> WholeRun:
    watched = _Watched(runner)
    limits = SchedulerLimits(scale.max_num_seqs, scale.max_num_batched_tokens, prefix_cache=False)
    engine = Engine(watched, limits)
    submits = [
        Submit(SequenceId(str(k), 0), request.prompt_ids, GREEDY, 0, request.num_outputs)
        for k, request in enumerate(requests)
    ]
    began = time.perf_counter()
    num_outputs = len(engine.step(submits))
    while engine.has_work:
        num_outputs += len(engine.step())
    seconds = time.perf_counter() - began
    expected = sum(request.num_outputs for request in requests)
    if num_outputs != expected:
        raise RuntimeError(f"{num_outputs} tokens came, {expected} were asked for")
    return WholeRun(
        seconds=seconds,
        num_outputs=num_outputs,
        num_prompt_tokens=sum(len(request.prompt_ids) for request in requests),
        num_steps=watched.num_steps,
        unused_slots=1 - watched.num_used / watched.num_slots,
        num_preemptions=engine.load().num_preemptions,
    )

"""Decode steps and prompts on a runner, in the way the engine runs them."""

import random
import time
from collections.abc import Iterator, Sequence

import torch

from bench.gpu.figures import Ceilings, Figure, failure, seconds_of
from bench.gpu.model import prompt_flops, step_bytes
from bench.gpu.scale import Scale
from shared.messages import SamplingParams
from worker.engine.interface import ScheduledBatch, ScheduledSequence, SequenceId, StepHandle
from worker.model.runner import TorchRunner

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, ignore_eos=True)
_NUM_STEPS = 30
_GOALS = {1: 0.85, 64: 0.7, 256: 0.7}
"""The minimum ratio of the floor to the measured time, by batch size."""


class Steps:
    """Runs steps of a runner with an uninitialised cache: values do not affect the time."""

    def __init__(self, scale: Scale, runner: TorchRunner, device: torch.device) -> None:
        self._scale = scale
        self._runner = runner
        self._device = device
        self._blocks = random.Random(0).sample(range(runner.num_blocks), runner.num_blocks)

    def decode_ms(self, num_seqs: int, sampling: SamplingParams = GREEDY) -> float:
        """The time of a step. Each step is launched while the previous step computes, as in the
        engine."""
        self._decode(num_seqs, 5, sampling)
        with seconds_of(self._device) as seconds:
            self._decode(num_seqs, _NUM_STEPS, sampling)
        return seconds() / _NUM_STEPS * 1e3

    def prefill_ms(self, num_tokens: int) -> float:
        """The time of a step with a single prompt."""
        (table,) = self.tables(1, num_tokens)
        prompt = ScheduledBatch([self._share(0, 0, num_tokens, table, None, GREEDY)])
        self._runner.launch(prompt).result()
        taken: list[float] = []
        for _ in range(5):
            began = time.perf_counter()
            self._runner.launch(prompt).result()
            taken.append(time.perf_counter() - began)
        return sorted(taken)[2] * 1e3

    def decode(self, num_seqs: int, num_steps: int) -> None:
        """Run this many steps. The tokens of each step are the draws of the previous step."""
        self._decode(num_seqs, num_steps, GREEDY)

    def _decode(self, num_seqs: int, num_steps: int, sampling: SamplingParams) -> None:
        context = self._scale.context_len - 1
        tables = self.tables(num_seqs, self._scale.context_len)
        in_flight: StepHandle | None = None
        for step in range(num_steps):
            row = range(num_seqs) if step else [None] * num_seqs
            shares = [
                self._share(k, context, 1, tables[k], row[k], sampling) for k in range(num_seqs)
            ]
            launched = self._runner.launch(ScheduledBatch(shares))
            if in_flight is not None:
                in_flight.result()
            in_flight = launched
        assert in_flight is not None
        in_flight.result()

    def _share(
        self,
        k: int,
        start: int,
        num_tokens: int,
        block_table: Sequence[int],
        previous_row: int | None,
        sampling: SamplingParams,
    ) -> ScheduledSequence:
        return ScheduledSequence(
            sequence_id=SequenceId("bench", k),
            start=start,
            token_ids=[(7919 * (k + at)) % self._runner.vocab_size for at in range(num_tokens)],
            block_tables=[block_table],
            is_sampled=True,
            sampling=sampling,
            seed=k,
            position=0,
            previous_row=previous_row,
        )

    def tables(self, num_seqs: int, num_tokens: int) -> list[list[int]]:
        """Blocks for each sequence, in random order, as after hours of operation.

        No two sequences share a block, because the device's cache would hold a shared block. Raises
        `ValueError` if the KV cache is too small.
        """
        num_blocks = -(-num_tokens // self._runner.block_size)
        if num_seqs * num_blocks > len(self._blocks):
            raise ValueError(f"{num_seqs * num_blocks} blocks, but there are {len(self._blocks)}")
        return [self._blocks[k * num_blocks : (k + 1) * num_blocks] for k in range(num_seqs)]


def decodes(scale: Scale, steps: Steps, ceilings: Ceilings, dtype: torch.dtype) -> Iterator[Figure]:
    """Measure a step at each batch size."""
    for num_seqs in scale.batches:
        name = f"{num_seqs} x 1 after {scale.context_len - 1}"
        try:
            taken_ms = steps.decode_ms(num_seqs)
        except Exception as error:  # noqa: BLE001 (the other sizes are worth something)
            yield failure("decode", name, error)
            continue
        floor_ms = ceilings.floor_ms(step_bytes(scale, dtype, num_seqs))
        yield Figure(
            section="decode",
            name=name,
            value=taken_ms,
            unit="ms",
            ratio=floor_ms / taken_ms,
            goal=_GOALS.get(num_seqs),
            note=f"floor {floor_ms:.2f} ms: weights and KV cache read once",
        )


def drawn(steps: Steps, num_seqs: int) -> Figure:
    """The cost of drawing instead of taking the most likely token."""
    greedy_ms, drawn_ms = steps.decode_ms(num_seqs), steps.decode_ms(num_seqs, DRAWN)
    return Figure(
        section="decode",
        name=f"{num_seqs} x 1, top-k and top-p",
        value=drawn_ms,
        unit="ms",
        ratio=greedy_ms / drawn_ms,
        note="greedy over drawn",
    )


def prefills(
    scale: Scale, steps: Steps, ceilings: Ceilings, lengths: Sequence[int]
) -> Iterator[Figure]:
    """Measure single prompts, relative to the matrix products that they need."""
    for length in lengths:
        taken_ms = steps.prefill_ms(length)
        yield Figure(
            section="prefill",
            name=f"1 x {length}",
            value=taken_ms,
            unit="ms",
            ratio=ceilings.floor_ms(0, prompt_flops(scale, length)) / taken_ms,
            note="share of the floor, by the matmul's rate",
        )

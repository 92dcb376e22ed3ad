"""What a decode step costs the host: all but the kernels, measured without a GPU.

    python -m bench.gpu.host [--profile] [--steps N]

A decoder and operations that compute nothing leave the scheduler, the inputs' layout, the
preparation of the draws and the outputs. Times are CPU seconds of all threads, which share the
interpreter's lock, so that other processes on the machine hardly disturb them.
"""

import argparse
import cProfile
import pstats
import time
from typing import Any

import torch
from torch import Tensor

from bench.gpu import report
from bench.gpu.figures import Figure
from bench.gpu.steps import DRAWN, GREEDY
from kernels.providers import Ops, Provider, load_ops
from shared.messages import SamplingParams
from worker.engine.engine import Engine
from worker.engine.interface import SequenceId, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.forward import Decoder, ForwardInputs, Traits
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.runner import TorchRunner

GOALS_MS = {64: 0.5, 256: 1.5, 512: 3.0}
"""The maximum per step, by the number of sequences."""
_CPU = torch.device("cpu")
_BLOCK = BlockShape(1, 16, 1, 1, torch.float32)
_PROMPT_LEN = 256
_NUM_WARM = 8


class IdleDecoder(Decoder):
    """A `Decoder` whose logits are undefined."""

    num_layers = num_kv_heads = head_dim = 1
    vocab_size = 128_256
    max_seq_len = 8192
    dtype = torch.float32
    device = _CPU
    provider: Provider = "reference"
    traits = Traits(numerics="idle")

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        # A view, because real logits would take milliseconds to allocate on the CPU.
        return torch.zeros(1, 1).expand(len(inputs.sampled_rows), self.vocab_size)


def idle_ops() -> Ops:
    """Operations that draw token 0 from any logits."""

    def drawn(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(len(logits), dtype=torch.int64)

    def floors(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(len(logits))

    return load_ops("reference").replace(most_likely=drawn, draw_rows=drawn, filter_floors=floors)


class HostSteps:
    """An engine with this many decoding sequences."""

    def __init__(self, num_seqs: int, sampling: SamplingParams) -> None:
        num_tokens = num_seqs * _PROMPT_LEN
        cache = KVCache.allocate(_BLOCK, 4 * num_tokens // _BLOCK.block_size, _CPU)
        runner = TorchRunner(
            IdleDecoder(), cache, idle_ops(), max_seq_len=8192, max_num_batched_tokens=num_tokens
        )
        self._engine = Engine(runner, SchedulerLimits(num_seqs, num_tokens))
        self._engine.step(
            [
                Submit(SequenceId(str(k), 0), [k + 2] * _PROMPT_LEN, sampling, k, 2 * _PROMPT_LEN)
                for k in range(num_seqs)
            ]
        )
        self.run(_NUM_WARM)

    def run(self, num_steps: int) -> int:
        """Run steps; returns the number of tokens."""
        return sum(len(self._engine.step()) for _ in range(num_steps))

    def step_ms(self, num_steps: int) -> float:
        """The CPU time of a step, of all threads."""
        began = time.process_time()
        self.run(num_steps)
        return (time.process_time() - began) / num_steps * 1e3

    def close(self) -> None:
        self._engine.close()


def measure(num_seqs: int, name: str, sampling: SamplingParams, num_steps: int) -> Figure:
    """The fastest of three, because caches are shared with other processes."""
    steps = HostSteps(num_seqs, sampling)
    taken_ms = min(steps.step_ms(num_steps) for _ in range(3))
    steps.close()
    return Figure(
        section="host",
        name=f"{num_seqs} x 1, {name}",
        value=taken_ms,
        unit="ms",
        ratio=GOALS_MS[num_seqs] / taken_ms,
        goal=1.0,
        note=f"to {GOALS_MS[num_seqs]} ms",
    )


def profile(num_seqs: int, num_steps: int) -> None:
    """Print where the engine's thread spends its time."""
    steps = HostSteps(num_seqs, GREEDY)
    with cProfile.Profile() as profiled:
        steps.run(num_steps)
    steps.close()
    pstats.Stats(profiled).sort_stats("tottime").print_stats(25)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.host", description=__doc__)
    parser.add_argument("--profile", action="store_true", help="Of the largest step.")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.profile:
        profile(max(GOALS_MS), options.steps)
        return
    figures = [
        measure(num_seqs, name, sampling, options.steps)
        for num_seqs in GOALS_MS
        for name, sampling in (("greedy", GREEDY), ("top-k and top-p", DRAWN))
    ]
    print(report.table(figures))


if __name__ == "__main__":
    main()

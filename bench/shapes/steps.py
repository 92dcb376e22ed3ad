"""The time of decode steps and prompts in an engine."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.shapes.random_model import RandomReader
from kernels.native.library import library
from kernels.providers import load_ops
from shared.messages import SamplingParams
from worker.engine.engine import Engine
from worker.engine.interface import SequenceId, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.decoders.fused import FusedDecoder
from worker.model.forward import ForwardInputs
from worker.model.kv_cache import KVCache
from worker.model.spec import ModelSpec
from worker.model.start import RunnerLimits, start_runner

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_MAX_SEQ_LEN = 1024
_CACHE_BYTES = 1 << 29


@dataclass(frozen=True, kw_only=True)
class DecoderTimes:
    """The time of the decoder in a decode step or a prompt, and that of its parts."""

    total_ms: float
    parts: dict[str, float]


class TimedDecoder(FusedDecoder):
    """A decoder with random weights that measures its steps."""

    def __init__(self, spec: ModelSpec, weights: RandomReader, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        super().__init__(spec, weights, _MAX_SEQ_LEN, dtype=weights.dtype, num_threads=num_threads)
        torch.set_num_threads(1)  # as a worker does
        library().num_threads = num_threads
        self._steps: list[tuple[int, dict[str, float]]] = []

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """See `Decoder.forward`."""
        self.profile()
        logits = super().forward(inputs, kv_cache)
        self._steps.append((len(inputs.token_ids), self.profile()))
        return logits

    def prepare(self, inputs: ForwardInputs, kv_cache: KVCache) -> Callable[[], Tensor]:
        """See `Decoder.prepare`."""
        return partial(self.forward, inputs, kv_cache)

    def decodes(self, num_seqs: int, context: int, num_steps: int) -> DecoderTimes:
        """The fastest of the steps of so many sequences after ``context`` tokens."""
        self._generate(num_seqs, context, num_steps)
        return _fastest([parts for num_tokens, parts in self._steps if num_tokens == num_seqs])

    def prompts(self, num_tokens: int, num_prompts: int) -> DecoderTimes:
        """The fastest of prompts that are computed alone."""
        found = []
        for _ in range(num_prompts):
            self._generate(1, num_tokens, 1)
            parts = [parts for _, parts in self._steps]
            found.append({name: sum(part[name] for part in parts) for name in parts[0]})
        return _fastest(found)

    def _generate(self, num_seqs: int, num_tokens: int, num_outputs: int) -> None:
        """Generate ``num_outputs`` tokens for each of some random prompts, together."""
        self._steps.clear()
        limits = RunnerLimits(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs * num_tokens,
            max_seq_len=num_tokens + num_outputs,
            kv_cache_bytes=_CACHE_BYTES,
        )
        runner = start_runner(self, load_ops("native"), limits, has_graphs=False)
        engine = Engine(runner, SchedulerLimits(num_seqs, num_seqs * num_tokens))
        engine.step([self._submit(k, num_tokens, num_outputs) for k in range(num_seqs)])
        while engine.has_work:
            engine.step()
        engine.close()

    def _submit(self, name: int, num_tokens: int, num_outputs: int) -> Submit:
        prompt = torch.randint(0, self.vocab_size, (num_tokens,)).tolist()
        return Submit(SequenceId(str(name), 0), prompt, _GREEDY, 0, num_outputs)


def _fastest(times: list[dict[str, float]]) -> DecoderTimes:
    """The fastest of some steps: others were disturbed."""
    best = min(times, key=lambda parts: sum(parts.values()))
    parts = {name: seconds * 1e3 for name, seconds in best.items()}
    return DecoderTimes(total_ms=sum(parts.values()), parts=parts)

"""Runs steps of a decoder on a thread of its own, in order."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from kernels.providers import Ops
from worker.engine.interface import ScheduledBatch
from worker.model.inputs import StepInputs, build_inputs
from worker.model.interface import Decoder
from worker.model.kv_cache import KVCache
from worker.model.sampler import sample


class TorchStep:
    """A `StepHandle`: the token ids are on the host once the device has come so far."""

    def __init__(self, step: "Future[tuple[Tensor, torch.Event | None]]") -> None:
        self._step = step

    def result(self) -> list[int]:
        token_ids, copied = self._step.result()
        if copied is not None:
            copied.synchronize()
        drawn: list[int] = token_ids.tolist()
        return drawn


class TorchRunner:
    """A `ModelRunner` for any `Decoder`.

    The caller's thread lays out the inputs while the compute thread, which alone touches weights,
    cache and the last step's tokens, is busy with the step before; torch lets go of the
    interpreter's lock in its operations. On CUDA the compute thread only fills the device's queue.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        ops: Ops,
        *,
        max_seq_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._ops = ops
        self._max_seq_len = max_seq_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._last_drawn = torch.empty(0, dtype=torch.int64, device=decoder.device)
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    @property
    def num_blocks(self) -> int:
        return self._kv_cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._kv_cache.block_size

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self._max_seq_len

    def launch(self, batch: ScheduledBatch) -> TorchStep:
        """Start a step. Raises `ValueError` where the batch does not keep to the limits."""
        if batch.num_tokens > self._max_num_batched_tokens:
            raise ValueError(f"{batch.num_tokens} tokens, at most {self._max_num_batched_tokens}")
        inputs = build_inputs(batch, self.block_size, self._decoder.device)
        return TorchStep(self._compute.submit(self._step, inputs))

    def close(self) -> None:
        """Wait for the steps that were launched; another launch raises `RuntimeError`."""
        self._compute.shutdown()

    @torch.inference_mode()
    def _step(self, inputs: StepInputs) -> tuple[Tensor, torch.Event | None]:
        carried = self._last_drawn[inputs.carried_rows]
        inputs.forward.token_ids[inputs.carried_tokens] = carried
        # Should this step fail, the next one finds nothing to go on with and fails too.
        self._last_drawn = self._last_drawn[:0]
        logits = self._decoder.forward(inputs.forward, self._kv_cache)
        self._last_drawn = sample(self._ops, logits, inputs.sampling)
        return _to_host(self._last_drawn)


def _to_host(token_ids: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Copy without waiting; the event, where there is one, says when the copy is done."""
    if token_ids.device.type == "cpu":
        return token_ids, None
    there = torch.empty_like(token_ids, device="cpu", pin_memory=True)
    there.copy_(token_ids, non_blocking=True)
    copied = torch.Event("cuda")
    copied.record()
    return there, copied

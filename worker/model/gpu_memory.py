"""Measures how much GPU memory is left for the KV cache, by running the largest step."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.providers import Ops
from shared.errors import StartupError
from shared.host_memory import readable_size
from shared.messages import SamplingParams
from worker.engine.cache.layout import ONE_FULL, CacheGroup, StateCache
from worker.engine.interface import ScheduledBatch, ScheduledSequence, SequenceId, StepFailed
from worker.engine.step_plan import MAX_SCORED_TOKENS
from worker.model.cache_layout import CacheLayout
from worker.model.forward import Decoder
from worker.model.graphs import CudaRecorder, DecodeGraphs
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.runner import TorchRunner
from worker.model.warm_up import warm_steps

_COSTLIEST = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, logprobs=20, prompt_logprobs=20)
"""The sampling parameters that need the most memory."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device in bytes."""

    total: int
    used: int
    """The memory of weights, of the driver and of other processes."""
    activations: int
    """The peak of a step's activations."""
    graphs: int

    def left(self, share: float) -> int:
        """Memory left for the KV cache if ``share`` of the total may be used; at least 0."""
        return max(0, int(self.total * share) - self.used - self.activations - self.graphs)

    def __str__(self) -> str:
        names = ("total", "used", "activations", "graphs")
        return ", ".join(f"{name} {readable_size(getattr(self, name))}" for name in names)


def measure(
    decoder: Decoder,
    ops: Ops,
    block: BlockShape,
    layout: CacheLayout,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_seq_len: int,
    graph_sizes: Sequence[int],
) -> DeviceMemory:
    """Run the largest step on a minimal cache and record the largest graphs.

    Before that, run a step of every other kind, so that later steps compile nothing. Raises
    `StartupError` if even these do not fit.
    """
    batch = largest_step(max_num_seqs, max_num_batched_tokens, block.block_size, layout.groups)
    free, total = _free_bytes(decoder.device), torch.cuda.mem_get_info(decoder.device)[1]
    others = warm_steps(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_seq_len=max_seq_len,
        block_size=block.block_size,
        vocab_size=decoder.vocab_size,
        groups=layout.groups,
    )
    batches = [*others, batch]
    try:
        step, graphs = _tried(decoder, ops, block, layout, batches, graph_sizes, max_seq_len)
    except (torch.OutOfMemoryError, StepFailed) as error:
        raise too_large(batch, free, total) from error
    # The cache of the trial has been freed by now.
    free = _free_bytes(decoder.device)
    return DeviceMemory(total, total - free, step, graphs)


def too_large(batch: ScheduledBatch, free: int, total: int) -> StartupError:
    """The error of a step that does not fit into the bytes that are free beside the weights."""
    return StartupError(
        f"a step of {batch.num_tokens} tokens and {len(batch.sequences)} sequences needs more than "
        f"the {readable_size(free)} of memory that are free beside the weights (the device has "
        f"{readable_size(total)}): lower --max-num-batched-tokens or --max-num-seqs"
    )


def _tried(
    decoder: Decoder,
    ops: Ops,
    block: BlockShape,
    layout: CacheLayout,
    batches: Sequence[ScheduledBatch],
    graph_sizes: Sequence[int],
    max_seq_len: int,
) -> tuple[int, int]:
    """The bytes of the last of the steps and of the graphs."""
    *others, largest = batches
    num_blocks = sum(len(sequence.block_tables[0]) for sequence in largest.sequences)
    kv_cache = KVCache.allocate(block, num_blocks, decoder.device, layout)
    for batch in others:
        run_step(decoder, ops, kv_cache, batch)
    step = _peak_bytes(lambda: run_step(decoder, ops, kv_cache, largest), decoder.device)
    if not graph_sizes:
        return step, 0
    return step, _graph_bytes(decoder, kv_cache, graph_sizes, max_seq_len)


def run_step(decoder: Decoder, ops: Ops, kv_cache: KVCache, batch: ScheduledBatch) -> None:
    """Run a step from inputs to drawn and scored tokens. Raises `StepFailed` if out of memory."""
    num_tokens = batch.num_tokens
    runner = TorchRunner(
        decoder, kv_cache, ops, max_seq_len=num_tokens, max_num_batched_tokens=num_tokens
    )
    try:
        runner.launch(batch).result()
    finally:
        runner.close()


def largest_step(
    max_num_seqs: int,
    max_num_tokens: int,
    block_size: int,
    groups: Sequence[CacheGroup] = ONE_FULL,
) -> ScheduledBatch:
    """The step with the most tokens, sequences, draws and scored tokens.

    All groups have the same blocks, and all states are in block 0, so the results have no meaning.
    """
    lens = [n for k in range(max_num_seqs) if (n := (max_num_tokens + k) // max_num_seqs)]
    others = [0, *itertools.accumulate(num_tokens - 1 for num_tokens in lens)]
    scored = [min(MAX_SCORED_TOKENS, num_others) for num_others in others]
    num_blocks = [-(-num_tokens // block_size) for num_tokens in lens]
    firsts = [sum(num_blocks[:k]) for k in range(len(lens))]
    return ScheduledBatch(
        [
            ScheduledSequence(
                sequence_id=SequenceId("largest step", k),
                start=0,
                token_ids=[1] * lens[k],
                block_tables=[
                    [0] * group.num_blocks
                    if isinstance(group, StateCache)
                    else range(firsts[k], firsts[k] + num_blocks[k])
                    for group in groups
                ],
                is_sampled=True,
                sampling=_COSTLIEST,
                seed=0,
                position=0,
                scored_ids=[1] * (scored[k + 1] - scored[k]),
            )
            for k in range(len(lens))
        ]
    )


def _graph_bytes(
    decoder: Decoder, kv_cache: KVCache, sizes: Sequence[int], max_seq_len: int
) -> int:
    """The memory of all graphs: the largest graph's, and for each other graph as much as the second
    graph adds."""
    before = _free_bytes(decoder.device)
    taken: list[int] = []
    DecodeGraphs(
        decoder,
        kv_cache,
        sizes[-2:],
        CudaRecorder(),
        max_seq_len=max_seq_len,
        progress=lambda done, total: taken.append(before - _free_bytes(decoder.device)),
    )
    return taken[0] + (len(sizes) - 1) * max(0, taken[-1] - taken[0])


def _peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """The peak allocation of ``work`` in its second run, when all kernels are compiled."""
    work()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]

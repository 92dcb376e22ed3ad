"""Starts a runner for a decoder: chooses the context length and cache size, and records graphs."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.providers import Ops, Provider
from shared.errors import StartupError
from worker.engine.cache.block_pool import BlockPool
from worker.engine.sequence_cache import SequenceCache
from worker.model import gpu_memory
from worker.model.cache_layout import CacheLayout, layout_of_spec, one_group
from worker.model.forward import Decoder
from worker.model.graphs import CudaRecorder, DecodeGraphs, ladder
from worker.model.kv_cache import BlockShape, KVCache, cpu_bytes, num_blocks_for
from worker.model.runner import TorchRunner
from worker.model.spec import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """The capacity that a runner must provide."""

    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_seq_len: int | None = None
    """None: limited by the model and the cache."""
    kv_cache_bytes: int | None = None
    """None: on the CPU a share of the free memory, on a GPU the rest of ``gpu_memory_share``, but
    no more than ``max_num_seqs`` sequences of maximum length can fill."""
    gpu_memory_share: float = 0.9
    """The fraction of the GPU's memory for weights, activations, graphs and cache together."""

    def longest(self, supported: int) -> int:
        """The maximum context length of a model that supports so many tokens. Raises `StartupError`
        if it is less."""
        longest = self.max_seq_len or supported
        if longest > supported:
            raise StartupError(f"max_seq_len is {longest}, but the model supports {supported}")
        return longest

    def check(self, spec: ModelSpec, dtype: torch.dtype, provider: Provider) -> None:
        """Check the limits against the configuration of a model whose keys and values have this
        ``dtype``, before its weights are read.

        Raises `StartupError` if the model supports a shorter context, or if ``kv_cache_bytes`` are
        too few.
        """
        longest = self.longest(spec.max_seq_len)
        if self.kv_cache_bytes is None:
            return
        layout = layout_of_spec(spec, longest, provider, self.block_size, dtype)
        block = _block_shape(spec, layout, self.block_size, dtype)
        num_blocks = num_blocks_for(
            block,
            kv_cache_bytes=self.kv_cache_bytes,
            free_bytes=0,
            max_num_blocks=0,
            min_num_blocks=self.divide(1, layout).num_blocks_for(1),
        )
        self.require_room(longest, block, self.divide(num_blocks, layout))

    def divide(self, num_blocks: int, layout: CacheLayout) -> SequenceCache:
        """The cache that an engine with these limits divides among sequences."""
        return SequenceCache(
            BlockPool(num_blocks, self.block_size),
            layout.groups,
            max_step_tokens=self.max_num_batched_tokens,
            has_prefixes=True,
        )

    def require_room(self, longest: int, block: BlockShape, cache: SequenceCache) -> None:
        """Raise `StartupError` if a cache cannot hold a context of the wanted length."""
        num_held = cache.longest(longest)
        if self.max_seq_len is not None and longest > num_held:
            raise StartupError(
                f"max_seq_len is {longest}, but the KV cache holds {num_held} tokens in "
                f"{cache.num_blocks * block.num_bytes:,} bytes: lower --max-seq-len, or raise "
                f"--kv-cache-bytes to {cache.num_blocks_for(longest) * block.num_bytes:,}"
            )


DEFAULT_LIMITS = RunnerLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMemory:
    """The memory of a sequence in the cache: bytes, in whole blocks."""

    tokens: int
    """Keys and values."""
    states: int
    """The recurrent states that a step reads and writes, without the snapshots of prefixes, which
    are evicted."""

    @property
    def total(self) -> int:
        return self.tokens + self.states


def sequence_memory(
    spec: ModelSpec, num_tokens: int, dtype: torch.dtype, provider: Provider = "native"
) -> SequenceMemory:
    """The memory of a sequence of ``num_tokens`` in a cache of this type, if that is the longest
    context."""
    limits = DEFAULT_LIMITS
    layout = layout_of_spec(spec, num_tokens, provider, limits.block_size, dtype)
    block = _block_shape(spec, layout, limits.block_size, dtype)
    num_states = 0 if layout.state is None else 2 * layout.state.num_blocks
    num_blocks = limits.divide(1, layout).num_blocks_for(num_tokens)
    return SequenceMemory(
        tokens=(num_blocks - num_states) * block.num_bytes,
        states=num_states * block.num_bytes,
    )


def start_runner(
    decoder: Decoder, ops: Ops, limits: RunnerLimits, *, has_graphs: bool
) -> TorchRunner:
    """Allocate the cache and, with ``has_graphs``, record the decode steps.

    ``ops`` draw the tokens. Raises `StartupError`.
    """
    longest = limits.longest(decoder.max_seq_len)
    graph_sizes = ladder(limits.max_num_seqs) if has_graphs else []
    layout = decoder.cache_layout(limits.block_size)
    block = _block_shape(decoder, layout, limits.block_size, decoder.cache_dtype)
    kv_cache = _kv_cache(decoder, ops, block, layout, limits, longest, graph_sizes)
    cache = limits.divide(kv_cache.num_blocks, layout)
    limits.require_room(longest, block, cache)
    longest = cache.longest(longest)
    decoder.expect(kv_cache)
    return TorchRunner(
        decoder,
        kv_cache,
        ops,
        max_seq_len=longest,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_longest=cache.num_blocks // cache.num_blocks_for(longest),
        graphs=_record(decoder, kv_cache, graph_sizes, longest) if graph_sizes else None,
    )


def whole_cache(decoder: Decoder, block_size: int, num_blocks: int) -> KVCache:
    """A cache in which all layers keep all tokens, for steps outside an engine.

    Raises `StartupError` if there is no memory for it, or if the model keeps states, for which such
    steps have no blocks.
    """
    layout = decoder.cache_layout(block_size)
    if layout.state is not None:
        raise StartupError("the model keeps recurrent states, which only an engine's cache holds")
    layout = replace(one_group(decoder.num_layers), has_values=layout.has_values)
    block = _block_shape(decoder, layout, block_size, decoder.cache_dtype)
    return KVCache.allocate(block, num_blocks, decoder.device, layout)


def _block_shape(
    model: ModelSpec | Decoder, layout: CacheLayout, block_size: int, dtype: torch.dtype
) -> BlockShape:
    """The shape of the blocks of a model's cache."""
    return BlockShape(
        layout.num_places,
        block_size,
        model.num_kv_heads,
        model.head_dim,
        dtype,
        layout.has_values,
    )


def can_record(decoder: Decoder) -> bool:
    """Whether the decode steps of this decoder can be recorded as graphs on its device."""
    return decoder.traits.can_record and decoder.device.type == "cuda"


def can_check_drafts(decoder: Decoder) -> bool:
    """Whether drafts can be checked: a token's logits have the same bits in a step of its own and
    behind other tokens of its sequence."""
    return decoder.traits.is_row_exact


def _kv_cache(
    decoder: Decoder,
    ops: Ops,
    block: BlockShape,
    layout: CacheLayout,
    limits: RunnerLimits,
    longest: int,
    graph_sizes: Sequence[int],
) -> KVCache:
    if decoder.device.type == "cuda":
        free_bytes = _gpu_bytes(decoder, ops, block, layout, limits, longest, graph_sizes)
    else:
        free_bytes = cpu_bytes()
    num_blocks = num_blocks_for(
        block,
        kv_cache_bytes=limits.kv_cache_bytes,
        free_bytes=free_bytes,
        max_num_blocks=limits.max_num_seqs * limits.divide(1, layout).num_blocks_for(longest),
        min_num_blocks=limits.divide(1, layout).num_blocks_for(1),
    )
    return KVCache.allocate(block, num_blocks, decoder.device, layout)


def _gpu_bytes(
    decoder: Decoder,
    ops: Ops,
    block: BlockShape,
    layout: CacheLayout,
    limits: RunnerLimits,
    longest: int,
    graph_sizes: Sequence[int],
) -> int:
    """The memory left for the cache. It is measured even if the cache's size is given, because this
    also compiles the kernels before the first request."""
    found = gpu_memory.measure(
        decoder,
        ops,
        block,
        layout,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_seq_len=longest,
        graph_sizes=graph_sizes,
    )
    logger.info("device memory", extra={"found": str(found)})
    return found.left(limits.gpu_memory_share)


def _record(
    decoder: Decoder, kv_cache: KVCache, sizes: Sequence[int], max_seq_len: int
) -> DecodeGraphs:
    began = time.monotonic()

    def progress(done: int, total: int) -> None:
        if done * 4 // total > (done - 1) * 4 // total:
            seconds = round(time.monotonic() - began, 1)
            extra = {"done": done, "total": total, "seconds": seconds}
            logger.info("CUDA graphs recorded", extra=extra)

    try:
        return DecodeGraphs(
            decoder, kv_cache, sizes, CudaRecorder(), max_seq_len=max_seq_len, progress=progress
        )
    except torch.OutOfMemoryError as error:
        raise StartupError(
            "the device has no memory for the CUDA graphs: lower --kv-cache-bytes or "
            "--gpu-memory-share"
        ) from error

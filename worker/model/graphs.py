"""CUDA graphs of decode-only steps, recorded for a range of batch sizes.

A decode step launches hundreds of small kernels, and at small batch sizes the host takes longer to
launch them than the device to execute them. A graph is launched at once. Because its memory
addresses are fixed, a step is copied into the graph's inputs and padded to a recorded size.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TypeAlias

import torch
from torch import Tensor

from worker.model.forward import Decoder, ForwardInputs
from worker.model.inputs import BY_GROUP, NO_SLOT, aligned_len
from worker.model.kv_cache import KVCache

DeviceWork: TypeAlias = Callable[[], None]
RecordWork: TypeAlias = Callable[[DeviceWork], DeviceWork]
"""Records the device work of a function; returns a function that replays it."""
OnRecorded: TypeAlias = Callable[[int, int], None]
"""Called with the number of recorded graphs and the total."""

_COPIED = ("token_ids", "positions", "slots", "context_lens")


def ladder(max_num_seqs: int) -> list[int]:
    """The batch sizes that graphs are recorded for, ascending; the last is ``max_num_seqs``."""
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 16))
    return [size for size in steps if size < max_num_seqs] + [max_num_seqs]


class CudaRecorder:
    """A `RecordWork` for the current CUDA device; all graphs share a memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: DeviceWork) -> DeviceWork:
        # Compilation and workspace allocation must not be recorded, so the work is run once before.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay


class DecodeGraphs:
    """Runs decode steps of any size up to the largest, from a single set of inputs."""

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        sizes: Sequence[int],
        record: RecordWork,
        *,
        max_seq_len: int,
        progress: OnRecorded = lambda done, total: None,
    ) -> None:
        """Record a graph for each of ``sizes``, ascending numbers of sequences.

        The largest is recorded first, because the others fit into its memory. ``max_seq_len`` is
        the maximum context length.
        """
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._sizes = sizes
        max_num_blocks = -(-max_seq_len // kv_cache.block_size)
        state = kv_cache.layout.state
        if state is not None:
            max_num_blocks = max(max_num_blocks, 2 * state.num_blocks)
        num_groups = len(kv_cache.layout.groups)
        self._inputs = _padding(sizes[-1], max_num_blocks, num_groups, decoder.device)
        self._logits = torch.empty(
            sizes[-1], decoder.vocab_size, dtype=torch.float32, device=decoder.device
        )
        self._replays: dict[int, DeviceWork] = {}
        for size in reversed(self._sizes):
            self._replays[size] = record(self._work(size))
            progress(len(self._replays), len(self._sizes))

    def size_for(self, num_seqs: int) -> int | None:
        """The number of sequences that a step is padded to; None if it exceeds all graphs."""
        at = bisect_left(self._sizes, num_seqs)
        return self._sizes[at] if at < len(self._sizes) else None

    def logits(self, inputs: ForwardInputs) -> Tensor:
        """Run a step that is padded to one of the sizes; returns [size, vocab_size] float32.

        The next step overwrites the result.
        """
        size = inputs.num_decodes
        for name in _COPIED:
            getattr(self._inputs, name)[..., :size].copy_(getattr(inputs, name))
        _, num_seqs, num_blocks = inputs.block_tables.shape
        self._inputs.block_tables[:, :num_seqs, :num_blocks].copy_(inputs.block_tables)
        self._replays[size]()
        return self._logits[:size]

    def _work(self, size: int) -> DeviceWork:
        inputs = _first(self._inputs, size)

        def work() -> None:
            self._logits[:size].copy_(self._decoder.forward(inputs, self._kv_cache))

        return work


def _padding(
    num_seqs: int, max_num_blocks: int, num_groups: int, device: torch.device
) -> ForwardInputs:
    """Sequences of one token with no slot and no context, which cost nothing."""
    tokens = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    num_slots = aligned_len(num_seqs, torch.int64.itemsize, num_groups)
    num_blocks = aligned_len(max_num_blocks, torch.int32.itemsize, num_groups)
    return ForwardInputs(
        token_ids=tokens,
        positions=tokens.clone(),
        slots=torch.full((num_groups, num_slots), NO_SLOT, device=device)[:, :num_seqs],
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        context_lens=torch.zeros(num_seqs, dtype=torch.int32, device=device),
        block_tables=torch.zeros(
            num_groups, num_seqs, num_blocks, dtype=torch.int32, device=device
        ),
        sampled_rows=torch.arange(num_seqs, device=device),
        num_decodes=num_seqs,
        max_query_len=1,
    )


def _first(inputs: ForwardInputs, size: int) -> ForwardInputs:
    """The first ``size`` sequences, in the same memory."""
    tensors = {
        field.name: tensor[:, :size]
        if field.name in BY_GROUP
        else tensor[: size + (field.name == "query_starts")]
        for field in fields(inputs)
        if isinstance(tensor := getattr(inputs, field.name), Tensor)
    }
    return ForwardInputs(**tensors, num_decodes=size, max_query_len=1)

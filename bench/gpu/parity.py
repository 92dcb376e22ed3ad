"""Compares whole steps of a model with two layers: ours beside the reference, and graphs beside
plain steps."""

import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu import model
from bench.gpu.figures import Figure, failure
from bench.gpu.kernels import KernelAgreement, agreement
from bench.gpu.scale import Scale
from bench.gpu.steps import GREEDY
from kernels.providers import Ops
from worker.engine.interface import ScheduledBatch, ScheduledSequence, SequenceId
from worker.model.decoders.stack import StackDecoder
from worker.model.graphs import CudaRecorder, DecodeGraphs, RecordWork
from worker.model.inputs import build_inputs, lay_out
from worker.model.kv_cache import KVCache
from worker.model.start import whole_cache

_NUM_LAYERS = 2
_MAX_ERROR = 2e-2
"""The maximum relative error of logits, as a norm: bfloat16 rounds every operation's result."""
_GRAPH_SIZE = 8


@torch.inference_mode()
def measure(
    scale: Scale, ops: Ops, reference: Ops, device: torch.device, dtype: torch.dtype
) -> Iterator[Figure]:
    """The distances of a step's logits. They are larger than the distances of single kernels,
    because everything between the kernels counts, too."""
    torch.manual_seed(0)
    shallow = scale.model.with_layers(_NUM_LAYERS)
    weights = model.weights(replace(scale, model=shallow), device, dtype)
    ours, theirs = (
        StackDecoder(shallow.spec, weights, one, shallow.max_seq_len) for one in (ops, reference)
    )
    steps = {
        "prompts": _step(scale, (scale.context_len, scale.context_len // 3, 2), context_len=0),
        "decodes": _step(scale, (1,) * 5, context_len=scale.context_len),
        "both": _step(scale, (1, 1, scale.context_len // 2), context_len=scale.context_len // 2),
    }
    cache = _cache(scale, ours)
    found: dict[str, Callable[[], KernelAgreement]] = {
        name: partial(_beside, ours, theirs, cache, step) for name, step in steps.items()
    }
    found["graph"] = partial(_graph, scale, ours, cache, steps["decodes"])
    for name, compare in found.items():
        what = f"{_NUM_LAYERS} layers, {name}"
        try:
            yield compare().figure(what)
        except Exception as error:  # noqa: BLE001 (the others are worth something)
            traceback.print_exc()
            yield failure("correct", what, error)


def _beside(
    ours: StackDecoder, theirs: StackDecoder, cache: KVCache, step: ScheduledBatch
) -> KernelAgreement:
    return agreement(_logits(ours, cache, step), _logits(theirs, cache, step), _MAX_ERROR)


def _graph(
    scale: Scale, decoder: StackDecoder, cache: KVCache, step: ScheduledBatch
) -> KernelAgreement:
    """A recorded step beside the same step without a graph."""
    expected = _logits(decoder, cache, step)
    record: RecordWork = CudaRecorder() if decoder.device.type == "cuda" else lambda work: work
    max_seq_len = 2 * scale.context_len
    graphs = DecodeGraphs(decoder, cache, [_GRAPH_SIZE], record, max_seq_len=max_seq_len)
    padded = lay_out(step, scale.block_size, decoder.device, graphs.size_for).send().forward
    got = graphs.logits(padded)[: len(expected)]
    return agreement(got, expected, _MAX_ERROR)


def _logits(decoder: StackDecoder, cache: KVCache, step: ScheduledBatch) -> Tensor:
    """The logits of a step that leaves the cache as it was."""
    keys = cache.keys.clone()
    values = keys if cache.values is cache.keys else cache.values.clone()
    copy = KVCache(keys, values, cache.layout)
    inputs = build_inputs(step, cache.block_size, decoder.device).forward
    return decoder.forward(inputs, copy).clone()


def _cache(scale: Scale, decoder: StackDecoder) -> KVCache:
    """Random keys and values."""
    cache = whole_cache(decoder, scale.block_size, _num_blocks(scale))
    for tensor in cache.tensors:
        tensor.normal_()
    return cache


def _num_blocks(scale: Scale) -> int:
    return _GRAPH_SIZE * -(-2 * scale.context_len // scale.block_size)


def _step(scale: Scale, num_tokens: tuple[int, ...], *, context_len: int) -> ScheduledBatch:
    """Sequences with this many new tokens after a context, each in blocks of its own."""
    draw = random.Random(0)
    blocks = draw.sample(range(_num_blocks(scale)), _num_blocks(scale))
    size = len(blocks) // _GRAPH_SIZE
    return ScheduledBatch(
        [
            ScheduledSequence(
                sequence_id=SequenceId("parity", k),
                start=context_len,
                token_ids=[draw.randrange(scale.model.vocab_size) for _ in range(length)],
                block_tables=[blocks[k * size : (k + 1) * size]],
                is_sampled=True,
                sampling=GREEDY,
                seed=0,
                position=0,
            )
            for k, length in enumerate(num_tokens)
        ]
    )

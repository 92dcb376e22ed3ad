"""Compares the result of each kernel with its reference, and its time with its floor."""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.case import MAX_COPIES, Case
from bench.gpu.figures import Ceilings, Figure, Work, device_ms, failure
from bench.gpu.mixers import Mixers
from bench.gpu.random_weights import AWQ_GROUP, RandomWeights
from bench.gpu.scale import Scale
from kernels.attention_spec import AttentionSpec
from kernels.planes import Planes
from kernels.providers import Ops

_MAX_ERROR = 1e-2
"""The maximum relative error, as a norm: bfloat16 rounds each element by up to 4e-3."""
_MAX_UNEQUAL = 0.01
"""The maximum share of drawn tokens that differ: another order of summation may move a boundary."""
_FAR = 1e4
_PLANE_FORMATS = ("q4_k", "q6_k", "mxfp4")
"""The formats of a Q4_K_M file and of gpt-oss."""


class Cases:
    """Inputs with the shapes of a model, on a device."""

    def __init__(self, scale: Scale, device: torch.device, dtype: torch.dtype) -> None:
        self._scale = scale
        self._model = scale.model
        self._device = device
        self._dtype = dtype
        self._random = RandomWeights(device, dtype)

    def all(self) -> Iterator[Case]:
        yield from self._by_token()
        yield self._rope_store_kv()
        yield from (self._decode(num_seqs) for num_seqs in self._scale.batches[1:])
        yield from self._unequal_attention()
        yield self._prefill()
        yield from (self._projection(num_tokens) for num_tokens in self._scale.batches)
        yield from (self._awq_linear(num_tokens) for num_tokens in self._scale.batches)
        for plane_format in _PLANE_FORMATS:
            yield from (self._plane_linear(plane_format, n) for n in self._scale.batches)
        yield self._logits()
        yield from self._sampling()
        yield from self._mixers()

    def _mixers(self) -> Iterator[Case]:
        scale = self._scale
        mixers = Mixers(scale.mixers, scale.block_size, self._device, self._dtype)
        yield from mixers.all(scale.batches, scale.num_tokens, scale.context_len)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).to(self._dtype)

    def _by_token(self) -> Iterator[Case]:
        num_tokens, width = self._scale.num_tokens, self._model.hidden_size
        hidden, residual = self._normal(num_tokens, width), self._normal(num_tokens, width)
        weight, gate_up = self._random.norm(width), self._normal(num_tokens, 2 * width)
        yield Case(
            name="rms_norm",
            call=lambda ops, *tensors: ops.rms_norm(*tensors, 1e-5),
            tensors=(hidden, weight),
            num_bytes=2 * hidden.nbytes,
        )
        yield Case(
            name="add_rms_norm",
            call=lambda ops, *tensors: ops.add_rms_norm(*tensors, 1e-5),
            tensors=(hidden, residual, weight),
            num_bytes=4 * hidden.nbytes,
        )
        yield Case(
            name="silu_mul",
            call=lambda ops, gate_up: ops.silu_mul(gate_up),
            tensors=(gate_up,),
            num_bytes=1.5 * gate_up.nbytes,
        )

    def _cache(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        model = self._model
        shape = (num_blocks, self._scale.block_size, model.num_kv_heads, model.head_dim)
        return self._normal(*shape), self._normal(*shape)

    def _rope_store_kv(self) -> Case:
        num_tokens, model = self._scale.num_tokens, self._model
        query = self._normal(num_tokens, model.num_heads, model.head_dim)
        key, value = (self._normal(num_tokens, model.num_kv_heads, model.head_dim) for _ in "kv")
        positions = torch.randint(model.max_seq_len, (num_tokens,), device=self._device)
        table = torch.randn(model.max_seq_len, model.head_dim, device=self._device)
        caches = self._cache(-(-num_tokens // self._scale.block_size))
        slots = torch.randperm(num_tokens, device=self._device)
        return Case(
            name="rope_store_kv",
            call=lambda ops, *tensors: ops.rope_store_kv(*tensors),
            tensors=(query, key, value, positions, table, *caches, slots),
            written=(5, 6),
            num_bytes=2 * (query.nbytes + key.nbytes + value.nbytes),
        )

    def _attention(self, name: str, context_lens: list[int], query_lens: list[int]) -> Case:
        """Attention of the last ``query_lens[s]`` tokens of ``context_lens[s]``."""
        model, block_size = self._model, self._scale.block_size
        num_blocks = [-(-length // block_size) for length in context_lens]
        query = self._normal(sum(query_lens), model.num_heads, model.head_dim)
        blocks = torch.randperm(sum(num_blocks), device=self._device).int()
        tables = torch.nn.utils.rnn.pad_sequence(
            list(torch.split(blocks, num_blocks)), batch_first=True
        )
        lens = torch.tensor([0, *query_lens], device=self._device)
        kv_elements = 2 * sum(context_lens) * model.num_kv_heads * model.head_dim
        options = {
            "num_decodes": query_lens.count(1),
            "max_query_len": max(query_lens),
            "spec": AttentionSpec(scale=model.head_dim**-0.5),
        }
        return Case(
            name=f"attention, {name}",
            call=lambda ops, *tensors: ops.paged_attention(*tensors, **options),
            tensors=(
                query,
                *self._cache(sum(num_blocks)),
                tables,
                lens.cumsum(0).int(),
                torch.tensor(context_lens, dtype=torch.int32, device=self._device),
            ),
            num_bytes=kv_elements * self._dtype.itemsize + 2 * query.nbytes,
        )

    def _equal_attention(self, num_seqs: int, num_tokens: int, context_len: int) -> Case:
        name = f"{num_seqs} x {num_tokens} in {context_len}"
        case = self._attention(name, [context_len] * num_seqs, [num_tokens] * num_seqs)
        return replace(case, library=self._library_attention(num_seqs, num_tokens, context_len))

    def _unequal_attention(self) -> Iterator[Case]:
        """A long context beside many short contexts, and few new tokens after a long context, as in
        the next turn of a chat."""
        context_len, num_seqs = self._scale.context_len, self._scale.batches[-1]
        long_len = 30 * context_len
        yield self._attention(
            f"1 in {long_len} beside {num_seqs - 1} in {context_len // 4}",
            [long_len] + [context_len // 4] * (num_seqs - 1),
            [1] * num_seqs,
        )
        yield self._attention(f"1 x 32 in {long_len}", [long_len], [32])

    def _library_attention(self, num_seqs: int, num_tokens: int, context_len: int) -> Work:
        """torch's attention over contiguous keys and values, which need no block table."""
        model = self._model
        query = self._normal(num_seqs, model.num_heads, num_tokens, model.head_dim)
        keys, values = (
            self._normal(num_seqs, model.num_kv_heads, context_len, model.head_dim) for _ in "kv"
        )
        return lambda: functional.scaled_dot_product_attention(
            query, keys, values, is_causal=num_tokens > 1, enable_gqa=True
        )

    def _decode(self, num_seqs: int) -> Case:
        return replace(self._equal_attention(num_seqs, 1, self._scale.context_len), goal=0.85)

    def _prefill(self) -> Case:
        length = self._scale.prefill_len
        case = self._equal_attention(1, length, length)
        # Half of all pairs of tokens, and two products with 2 FLOPs for each element of a head.
        return replace(case, num_flops=2 * length * case.tensors[0].numel(), goal_tflops=450)

    def _projection(self, num_tokens: int) -> Case:
        outputs, inputs = 2 * self._model.intermediate_size, self._model.hidden_size
        weight = self._random.dense(outputs, inputs).tensor
        return Case(
            name=f"projection, {num_tokens}",
            call=lambda ops, *tensors: ops.projection(*tensors, None),
            tensors=(self._normal(num_tokens, inputs), weight),
            num_bytes=weight.nbytes,
            num_flops=2 * num_tokens * outputs * inputs,
        )

    def _awq_linear(self, num_tokens: int) -> Case:
        outputs, inputs = 2 * self._model.intermediate_size, self._model.hidden_size
        weight = self._random.awq(outputs, inputs)
        packed = (weight.qweight, weight.scales, weight.zeros)
        return Case(
            name=f"awq_linear, {num_tokens}",
            call=lambda ops, *tensors: ops.awq_linear(*tensors, group_size=AWQ_GROUP),
            tensors=(self._normal(num_tokens, inputs), *packed),
            num_bytes=sum(tensor.nbytes for tensor in packed),
            num_flops=2 * num_tokens * outputs * inputs,
        )

    def _plane_linear(self, plane_format: str, num_tokens: int) -> Case:
        outputs = 2 * self._model.intermediate_size
        inputs = max(256, self._model.hidden_size)
        planes = self._random.planes(plane_format, outputs, inputs)
        return Case(
            name=f"plane_linear, {plane_format}, {num_tokens}",
            call=partial(_plane_linear, planes.format, planes.inputs),
            tensors=(self._normal(num_tokens, inputs), *planes.tensors),
            num_bytes=planes.num_bytes,
            num_flops=2 * num_tokens * outputs * inputs,
        )

    def _logits(self) -> Case:
        num_rows = self._scale.batches[-1]
        head = self._random.dense(self._model.vocab_size, self._model.hidden_size).tensor
        return Case(
            name=f"logits, {num_rows}",
            call=lambda ops, *tensors: ops.logits(*tensors),
            tensors=(self._normal(num_rows, self._model.hidden_size), head),
            num_bytes=head.nbytes + 4 * num_rows * self._model.vocab_size,
            num_flops=2 * num_rows * head.numel(),
        )

    def _sampling(self) -> Iterator[Case]:
        num_rows, vocab = self._scale.batches[-1], self._model.vocab_size
        logits = torch.randn(num_rows, vocab, device=self._device) * 3
        ones = torch.ones(num_rows, device=self._device)
        rows = torch.arange(num_rows, device=self._device)
        bounds = -(1 << 31), 1 << 31
        shape = num_rows, -(-vocab // 32)
        masks = torch.randint(*bounds, shape, dtype=torch.int32, device=self._device)
        yield Case(
            name=f"adjust_logits, {num_rows}",
            call=lambda ops, *tensors: ops.adjust_logits(*tensors),
            tensors=(logits.clone(), rows, rows % vocab, 1.1 * ones, -ones),
            num_bytes=8 * num_rows,
        )
        yield Case(
            name=f"mask_logits, {num_rows}",
            call=lambda ops, *tensors: ops.mask_logits(*tensors),
            tensors=(logits.clone(), rows, masks),
            num_bytes=logits.nbytes + masks.nbytes,
        )
        yield Case(
            name=f"filter_floors, {num_rows}",
            call=lambda ops, *tensors: ops.filter_floors(*tensors),
            tensors=(logits, ones, torch.full_like(rows, 50), 0.9 * ones, 0 * ones),
            num_bytes=logits.nbytes,
        )
        # At this temperature, rounding of the sum decides few draws.
        yield Case(
            name=f"draw_rows, {num_rows}",
            call=lambda ops, *tensors: ops.draw_rows(*tensors),
            tensors=(logits, ones / 2, -100 * ones, (rows + 0.5) / num_rows),
            num_bytes=logits.nbytes,
        )


def _plane_linear(
    plane_format: str, inputs: int, ops: Ops, hidden: Tensor, *tensors: Tensor
) -> Tensor:
    return ops.plane_linear(hidden, Planes(plane_format, inputs, *tensors))


@torch.inference_mode()
def measure(
    scale: Scale,
    ops: Ops,
    reference: Ops,
    ceilings: Ceilings,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[Figure]:
    """Return two figures per kernel: its distance from the reference, and its time relative to its
    floor. Some kernels have a third figure, the time relative to torch. If a kernel raises, its
    last figure is the error."""
    torch.manual_seed(0)
    for case in Cases(scale, device, dtype).all():
        try:
            yield from _figures(case, ops, reference, ceilings, device)
        except Exception as error:  # noqa: BLE001 (the other kernels are worth something)
            traceback.print_exc()
            yield failure("correct", case.name, error)


def _figures(
    case: Case, ops: Ops, reference: Ops, ceilings: Ceilings, device: torch.device
) -> Iterator[Figure]:
    agreements = map(agreement, case.results(ops), case.results(reference))
    yield max(agreements, key=lambda found: found.error).figure(case.name)
    taken_ms = device_ms(case.cold(ops), device, repeat=MAX_COPIES)
    ratio, goal = ceilings.floor_ms(case.num_bytes, case.num_flops) / taken_ms, case.goal
    note = "share of the floor"
    if case.goal_tflops is not None:
        ratio, goal = case.num_flops / taken_ms / 1e9 / case.goal_tflops, 1.0
        note = f"to {case.goal_tflops:.0f} TFLOP/s"
    yield Figure(
        section="kernels",
        name=case.name,
        value=1e3 * taken_ms,
        unit="us",
        ratio=ratio,
        goal=goal,
        note=note,
    )
    if case.library is not None:
        library_ms = device_ms(case.library, device)
        yield Figure(
            section="kernels",
            name=f"{case.name}, torch's",
            value=1e3 * library_ms,
            unit="us",
            ratio=library_ms / taken_ms,
            note="ours: times as fast",
        )


@dataclass(frozen=True)
class KernelAgreement:
    """How far a result is from the reference's."""

    error: float
    agrees: bool

    def figure(self, name: str) -> Figure:
        return Figure(
            section="correct",
            name=name,
            value=self.error,
            unit="error",
            ratio=float(self.agrees),
            goal=1.0,
            note="1 where it agrees with the reference",
        )


def agreement(ours: Tensor, theirs: Tensor, max_error: float = _MAX_ERROR) -> KernelAgreement:
    if ours.dtype == torch.int64:
        unequal = float((ours != theirs).double().mean())
        return KernelAgreement(unequal, unequal <= _MAX_UNEQUAL)
    # A provider may give a token that is never drawn the lowest float or -inf.
    ours, theirs = (tensor.double().clamp(-_FAR, _FAR) for tensor in (ours, theirs))
    error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
    return KernelAgreement(error, error <= max_error)

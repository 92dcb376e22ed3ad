"""A projection with 4-bit weights (AWQ: Lin et al., arXiv:2306.00978), unpacked in registers.

For few tokens the limit is reading the weight: half a byte for each of inputs * outputs, and 3
bytes for each group and output. It is read once, and inputs are split over programs until there are
enough programs. A word's 8 nibbles become floats without a conversion: they are inserted into the
mantissa of 2**23, from which one multiply-add subtracts the offset and the zero point. One token is
summed with multiply-adds, up to 64 with matrix instructions. For more tokens the weight is unpacked
to memory and multiplied like any other.
"""

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.awq_layout import CHUNK_INPUTS, CHUNK_WORDS, NIBBLES, check_awq
from kernels.triton.configurations import POINTER_TYPES, Configuration, launch

_BLOCK_OUTPUTS = 128
_BLOCK_TOKENS = (1, 16, 64)
_MAX_TOKENS = _BLOCK_TOKENS[-1]
_MAX_INVARIANT_TOKENS = 256
"""Tokens multiplied at a time in batch-invariant mode, which limits the memory of the splits."""
_MIN_PROGRAMS = 512
"""4 on each multiprocessor of an H100; a constant, so that every GPU sums in the same order."""
_SUM_BLOCK = 1024
_BASE_BITS = 0x4B000000
"""The bits of 2.0**23; an argument, because one instruction masks and merges only one constant."""


def awq_linear(
    hidden: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None = None,
    *,
    group_size: int,
    is_batch_invariant: bool = False,
) -> Tensor:
    """See `kernels.reference.awq_linear`.

    With ``is_batch_invariant`` a row's result is bit-identical whatever else is in the batch: one
    tile and one order of summation are used for any number of tokens.
    """
    check_awq(hidden, qweight, scales, zeros, bias, group_size)
    weight = (qweight.contiguous(), scales.contiguous(), zeros.contiguous())
    hidden = hidden.contiguous()
    num_tokens = hidden.shape[0]
    if is_batch_invariant:
        parts = hidden.split(_MAX_INVARIANT_TOKENS)
        return torch.cat([_multiply(p, *weight, bias, group_size, _MAX_TOKENS) for p in parts])
    if num_tokens <= _MAX_TOKENS:
        block_tokens = next(size for size in _BLOCK_TOKENS if size >= num_tokens)
        return _multiply(hidden, *weight, bias, group_size, block_tokens)
    product = hidden @ _dequantize(*weight, group_size, hidden.dtype)
    return product if bias is None else product.add_(bias)


def _multiply(
    hidden: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    group_size: int,
    block_tokens: int,
) -> Tensor:
    num_tokens, inputs = hidden.shape
    outputs = qweight.shape[1]
    out = torch.empty(num_tokens, outputs, dtype=hidden.dtype, device=hidden.device)
    if not num_tokens:
        return out
    num_chunks = inputs // CHUNK_INPUTS
    num_splits = _num_splits(num_chunks, outputs)
    parts = torch.empty(num_splits, *out.shape, dtype=torch.float32, device=hidden.device)
    tiles = (triton.cdiv(outputs, _BLOCK_OUTPUTS), num_splits)
    launch(
        _configuration(hidden.dtype, scales.dtype, group_size, block_tokens),
        (*tiles, triton.cdiv(num_tokens, block_tokens)),
        parts,
        hidden,
        qweight,
        scales,
        zeros,
        num_tokens,
        outputs,
        num_chunks,
        triton.cdiv(num_chunks, num_splits),
        _BASE_BITS,
    )
    grid = (num_tokens, triton.cdiv(outputs, _SUM_BLOCK))
    summation = _sum_configuration(hidden.dtype, bias is not None)
    launch(
        summation, grid, out, parts, out if bias is None else bias.contiguous(), outputs, num_splits
    )
    return out


def _num_splits(num_chunks: int, outputs: int) -> int:
    """Depends only on the weight's shape; no split is empty."""
    wanted = triton.cdiv(_MIN_PROGRAMS, triton.cdiv(outputs, _BLOCK_OUTPUTS))
    return int(triton.cdiv(num_chunks, triton.cdiv(num_chunks, wanted)))


@triton.jit
def _unpack(words, zero, base_bits, NIBBLE: tl.constexpr):
    """Nibble NIBBLE of ``words``, minus ``zero`` (float32): exact."""
    # Four nibbles fit into the mantissa without a shift.
    PLACE: tl.constexpr = NIBBLE % 4
    shifted = words >> 16 if NIBBLE >= 4 else words
    bits = (shifted & (15 << 4 * PLACE)) | base_bits
    return bits.to(tl.float32, bitcast=True) * 0.0625**PLACE - (zero + 8388608.0 * 0.0625**PLACE)


@triton.jit
def _add_product(sums, hidden_ptr, weights, HAS_DOT: tl.constexpr):
    """Add ``hidden`` times ``weights`` [words, outputs] float32.

    With matrix instructions ``hidden`` is [tokens, words] and ``sums`` [tokens, outputs]; otherwise
    they are [words] of one token and [words, outputs], whose rows are summed at the end.
    """
    hidden = tl.load(hidden_ptr)
    if HAS_DOT:
        sums = tl.dot(hidden, weights.to(hidden.dtype), sums, input_precision="ieee")
    else:
        sums += hidden.to(tl.float32)[:, None] * weights
    return sums


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "split_chunks"])
def awq_linear_kernel(
    parts_ptr,
    hidden_ptr,
    qweight_ptr,
    scales_ptr,
    zeros_ptr,
    num_tokens,
    outputs,
    num_chunks,
    split_chunks,
    base_bits,
    GROUP_SIZE: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    NIBBLES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    HAS_DOT: tl.constexpr,
):
    """The partial sums of one split's chunks, for a tile of outputs and of tokens."""
    split = tl.program_id(1)
    outs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_out = outs < outputs
    rows = tl.arange(0, CHUNK_WORDS)
    inputs = num_chunks.to(tl.int64) * CHUNK_WORDS * NIBBLES
    first = split * split_chunks
    if HAS_DOT:
        tokens = tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        # Tokens beyond the last one repeat it; their results are not stored.
        starts = tl.minimum(tokens, num_tokens - 1) * inputs
        hidden_ptr += starts[:, None] + rows[None, :]
        total = tl.zeros([BLOCK_TOKENS, BLOCK_OUTPUTS], tl.float32)
    else:
        hidden_ptr += tl.program_id(2) * inputs + rows
        total = tl.zeros([CHUNK_WORDS, BLOCK_OUTPUTS], tl.float32)
    for chunk in tl.range(first, tl.minimum(first + split_chunks, num_chunks)):
        word_rows = (chunk * CHUNK_WORDS + rows).to(tl.int64)
        places = qweight_ptr + word_rows[:, None] * outputs + outs[None, :]
        words = tl.load(places, mask=is_out[None, :], other=0)
        sums = tl.zeros_like(total)
        for nibble in tl.static_range(NIBBLES):
            start = (chunk * NIBBLES + nibble) * CHUNK_WORDS
            if nibble * CHUNK_WORDS % GROUP_SIZE == 0:
                group = (start // GROUP_SIZE).to(tl.int64) * outputs
                zero = tl.load(zeros_ptr + group + outs, mask=is_out, other=0)
                zero = zero.to(tl.float32)[None, :]
                scale = tl.load(scales_ptr + group + outs, mask=is_out, other=0.0)
                scale = scale.to(tl.float32)[None, :]
            weights = _unpack(words, zero, base_bits, nibble)
            if GROUP_SIZE < CHUNK_WORDS * NIBBLES:
                weights *= scale
            sums = _add_product(sums, hidden_ptr + start, weights, HAS_DOT)
        if GROUP_SIZE >= CHUNK_WORDS * NIBBLES:
            # The chunk has a single scale, which is applied to the unrounded sum.
            sums *= scale
        total += sums
    part_ptr = parts_ptr + split * num_tokens.to(tl.int64) * outputs
    if HAS_DOT:
        places = part_ptr + tokens.to(tl.int64)[:, None] * outputs + outs[None, :]
        tl.store(places, total, mask=(tokens < num_tokens)[:, None] & is_out[None, :])
    else:
        places = part_ptr + tl.program_id(2).to(tl.int64) * outputs + outs
        tl.store(places, tl.sum(total, axis=0), mask=is_out)


@triton.jit(do_not_specialize=["num_splits"])
def awq_sum_kernel(
    out_ptr, parts_ptr, bias_ptr, outputs, num_splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the splits in order, and add the bias, for one token."""
    token = tl.program_id(0).to(tl.int64)
    outs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = outs < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(num_splits):
        part = (split * tl.num_programs(0) + token) * outputs
        total += tl.load(parts_ptr + part + outs, mask=is_there, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outs, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * outputs + outs, total.to(out_ptr.dtype.element_ty), mask=is_there)


def _dequantize(
    qweight: Tensor, scales: Tensor, zeros: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Unpack the whole weight: [inputs, outputs]."""
    num_words, outputs = qweight.shape
    weight = torch.empty(num_words * NIBBLES, outputs, dtype=dtype, device=qweight.device)
    grid = (triton.cdiv(outputs, _BLOCK_OUTPUTS), num_words // CHUNK_WORDS)
    configuration = _dequantize_configuration(dtype, scales.dtype)
    launch(configuration, grid, weight, qweight, scales, zeros, outputs, group_size, _BASE_BITS)
    return weight


@triton.jit
def awq_dequantize_kernel(
    weight_ptr,
    qweight_ptr,
    scales_ptr,
    zeros_ptr,
    outputs,
    group_size,
    base_bits,
    CHUNK_WORDS: tl.constexpr,
    NIBBLES: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Unpack one chunk of a tile of outputs."""
    chunk = tl.program_id(1)
    outs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_there = (outs < outputs)[None, :]
    rows = tl.arange(0, CHUNK_WORDS).to(tl.int64)[:, None]
    words = tl.load(
        qweight_ptr + (chunk * CHUNK_WORDS + rows) * outputs + outs[None, :], mask=is_there, other=0
    )
    for nibble in tl.static_range(NIBBLES):
        start = (chunk * NIBBLES + nibble) * CHUNK_WORDS
        group = (start // group_size).to(tl.int64) * outputs + outs[None, :]
        zero = tl.load(zeros_ptr + group, mask=is_there, other=0).to(tl.float32)
        scale = tl.load(scales_ptr + group, mask=is_there, other=0.0).to(tl.float32)
        weights = (_unpack(words, zero, base_bits, nibble) * scale).to(weight_ptr.dtype.element_ty)
        tl.store(weight_ptr + (start + rows) * outputs + outs[None, :], weights, mask=is_there)


@cache
def _configuration(
    dtype: torch.dtype, scale_dtype: torch.dtype, group_size: int, block_tokens: int
) -> Configuration:
    return Configuration(
        kernel=awq_linear_kernel,
        signature={
            "parts_ptr": "*fp32:16",
            "hidden_ptr": POINTER_TYPES[dtype],
            **_weight_pointers(scale_dtype),
            "num_tokens": "i32",
            "outputs": "i32:16",
            **dict.fromkeys(("num_chunks", "split_chunks"), "i32"),
            "base_bits": "i32:16",
        },
        constexprs={
            "GROUP_SIZE": group_size,
            "CHUNK_WORDS": CHUNK_WORDS,
            "NIBBLES": NIBBLES,
            "BLOCK_TOKENS": block_tokens,
            "BLOCK_OUTPUTS": _BLOCK_OUTPUTS,
            "HAS_DOT": block_tokens > 1,
        },
        num_warps=8 if block_tokens == _MAX_TOKENS else 4,
        num_stages=2,
    )


@cache
def _sum_configuration(dtype: torch.dtype, has_bias: bool) -> Configuration:
    return Configuration(
        kernel=awq_sum_kernel,
        signature={
            "out_ptr": POINTER_TYPES[dtype],
            "parts_ptr": "*fp32:16",
            "bias_ptr": POINTER_TYPES[dtype],
            "outputs": "i32:16",
            "num_splits": "i32",
        },
        constexprs={"HAS_BIAS": has_bias, "BLOCK": _SUM_BLOCK},
    )


@cache
def _dequantize_configuration(dtype: torch.dtype, scale_dtype: torch.dtype) -> Configuration:
    return Configuration(
        kernel=awq_dequantize_kernel,
        signature={
            "weight_ptr": POINTER_TYPES[dtype],
            **_weight_pointers(scale_dtype),
            **dict.fromkeys(("outputs", "group_size", "base_bits"), "i32:16"),
        },
        constexprs={
            "CHUNK_WORDS": CHUNK_WORDS,
            "NIBBLES": NIBBLES,
            "BLOCK_OUTPUTS": _BLOCK_OUTPUTS,
        },
    )


def _weight_pointers(scale_dtype: torch.dtype) -> dict[str, str]:
    scales = POINTER_TYPES[scale_dtype]
    return {"qweight_ptr": "*i32:16", "scales_ptr": scales, "zeros_ptr": "*u8:16"}


def _configurations() -> Iterator[Configuration]:
    dtype = torch.bfloat16
    for block_tokens in _BLOCK_TOKENS:
        yield _configuration(dtype, torch.float16, CHUNK_INPUTS, block_tokens)
    yield _configuration(dtype, torch.float16, CHUNK_INPUTS // 4, _MAX_TOKENS)
    yield _sum_configuration(dtype, has_bias=True)
    yield _dequantize_configuration(dtype, torch.float16)


CONFIGURATIONS = tuple(_configurations())

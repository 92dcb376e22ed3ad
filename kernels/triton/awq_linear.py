"""A projection with 4-bit weights (AWQ: Lin et al., arXiv:2306.00978), unpacked in registers.

The product is computed transposed, so that the weight is the operand that a matrix instruction
takes from registers: the words are stored such that each thread unpacks exactly the values that the
instruction expects from it (`kernels.awq_layout`), and unpacked values are never exchanged between
threads. Two nibbles at a time become floats without a conversion: they are inserted into the
mantissas of 2**7 (bfloat16) or 2**10 (float16), from which a single subtraction, which is exact,
removes the offset and the zero point.

For few tokens the limit is reading the weight. Inputs are split over programs until there are
enough of them, and the last program of a tile to finish adds up the parts, in order. For many
tokens, reading and unpacking each weight once for each tile of tokens costs more than unpacking the
weight to memory and multiplying it like any other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.awq_layout import CHUNK_INPUTS, CHUNK_WORDS, check_awq
from kernels.triton.configurations import (
    POINTER_TYPES,
    TARGETS,
    Configuration,
    has_pdl,
    launch,
    pdl_targets,
    tile_target,
)


@dataclass(frozen=True, slots=True)
class _Tile:
    """The part of the product that a program computes."""

    tokens: int
    outputs: int
    num_warps: int
    num_stages: int
    num_programs: int
    """Inputs are split until there are about this many programs; a constant, so that every GPU sums
    in the same order."""
    has_unrolled_sum: bool
    """Whether all parts of a tile are loaded at once, rather than in turn."""
    scales_weights: bool = False
    """Whether weights are scaled, and rounded, before they are multiplied, instead of the sums of
    each group. It costs less if there are many tokens."""
    has_pdl: bool = True
    """Whether programs start before the previous kernel ends, on GPUs that can do so. The tile for
    the most tokens was measured without."""


_TILES = (
    _Tile(16, 64, num_warps=4, num_stages=3, num_programs=768, has_unrolled_sum=True),
    _Tile(64, 64, num_warps=4, num_stages=3, num_programs=396, has_unrolled_sum=False),
    _Tile(
        128,
        128,
        num_warps=8,
        num_stages=3,
        num_programs=132,
        has_unrolled_sum=False,
        scales_weights=True,
        has_pdl=False,
    ),
)
"""The fastest of about 20 variants measured on an H100 with the matrices of Llama 3.1 8B."""
_INVARIANT_TILE = _TILES[1]
_FLOAT32_TILE = _Tile(16, 64, num_warps=4, num_stages=2, num_programs=512, has_unrolled_sum=False)
_MAX_UNROLLED = 16
"""Splits whose parts are loaded at once."""
_MAX_TILED_TOKENS = 256
"""For more tokens the weight is unpacked to memory."""
_MAX_INVARIANT_TOKENS = 256
"""Tokens multiplied at a time in batch-invariant mode, which limits the memory of the parts."""
_NUM_COUNTERS = 16 * max(tile.num_programs for tile in (*_TILES, _FLOAT32_TILE))
"""Inputs are only split if there are fewer tiles than programs wanted. In batch-invariant mode only
one tile of tokens counts as such, and there are up to 16."""
_BASE_BITS = {torch.bfloat16: 0x4300, torch.float16: 0x6400, torch.float32: 0}
"""The bits of the power of two whose mantissa takes a nibble as an integer."""


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

    With ``is_batch_invariant`` a row's result is bit-identical whatever else is in the batch: the
    same tile and order of summation are used for any number of tokens. All calls on a device share
    counters, so they must be on the same stream.
    """
    check_awq(hidden, qweight, scales, zeros, bias, group_size)
    weight = (qweight.contiguous(), scales.contiguous(), zeros.contiguous())
    hidden = hidden.contiguous()
    bias = None if bias is None else bias.contiguous()
    num_tokens = hidden.shape[0]
    is_float32 = hidden.dtype == torch.float32
    if is_batch_invariant:
        tile = _FLOAT32_TILE if is_float32 else _INVARIANT_TILE
        parts = hidden.split(_MAX_INVARIANT_TOKENS)
        # The number of splits has to be that of a single tile of tokens.
        return torch.cat([_multiply(p, *weight, bias, group_size, tile, 1) for p in parts])
    if num_tokens <= _MAX_TILED_TOKENS:
        fitting = (tile for tile in _TILES if tile.tokens >= num_tokens)
        tile = _FLOAT32_TILE if is_float32 else next(fitting, _TILES[-1])
        token_tiles = triton.cdiv(num_tokens, tile.tokens)
        return _multiply(hidden, *weight, bias, group_size, tile, token_tiles)
    return torch.nn.functional.linear(hidden, _dequantize(*weight, group_size, hidden.dtype), bias)


def _multiply(
    hidden: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    group_size: int,
    tile: _Tile,
    token_tiles: int,
) -> Tensor:
    """``token_tiles`` is the number that the splits are chosen for."""
    num_tokens = hidden.shape[0]
    num_chunks, outputs = qweight.shape[:2]
    out = torch.empty(num_tokens, outputs, dtype=hidden.dtype, device=hidden.device)
    if not num_tokens:
        return out
    out_tiles = triton.cdiv(outputs, tile.outputs)
    num_splits = _num_splits(num_chunks, out_tiles * token_tiles, tile.num_programs)
    is_split = num_splits > 1
    size = (num_splits, *out.shape) if is_split else 1
    parts = torch.empty(size, dtype=torch.float32, device=hidden.device)
    is_unrolled = tile.has_unrolled_sum and num_splits <= _MAX_UNROLLED
    unrolled = num_splits if is_unrolled or not is_split else 0
    launch(
        _configuration(
            hidden.dtype,
            scales.dtype,
            group_size,
            tile,
            unrolled,
            has_bias=bias is not None,
            uses_pdl=has_pdl(hidden.device),
            target=tile_target(hidden.device),
        ),
        (triton.cdiv(num_tokens, tile.tokens), out_tiles, num_splits),
        out,
        parts,
        _counters(hidden.device),
        hidden,
        qweight,
        scales,
        zeros,
        out if bias is None else bias,
        num_tokens,
        outputs,
        num_chunks,
        triton.cdiv(num_chunks, num_splits),
        num_splits,
        _base_pair(hidden.dtype),
    )
    return out


def _num_splits(num_chunks: int, num_tiles: int, num_programs: int) -> int:
    """No split is empty."""
    wanted = min(num_chunks, max(1, round(num_programs / num_tiles)))
    return int(triton.cdiv(num_chunks, triton.cdiv(num_chunks, wanted)))


@cache
def _counters(device: torch.device) -> Tensor:
    """The number of finished splits of each tile. The last split sets it to 0 again."""
    return torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)


def _base_pair(dtype: torch.dtype) -> int:
    """Twice the base's bits: an argument, because an instruction masks and merges only one
    constant."""
    return _BASE_BITS[dtype] * 0x10001


@triton.jit
def _unpack(
    words,
    zeros,
    base_pair,
    BASE_BITS: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    SUBTRACTS_PAIRS: tl.constexpr,
):
    """Nibbles of ``words`` [outputs, 16] minus ``zeros`` [outputs, 1 or 128]: [outputs, 128]."""
    low_bytes = tl.join(words, words >> 8)
    # [outputs, 16, 2, 2], the last two dimensions being j.
    pairs = (tl.join(low_bytes, low_bytes >> 4) & 0x000F000F) | base_pair
    if SUBTRACTS_PAIRS:
        # The compiler would take the pairs apart, subtract, and join them again.
        offsets = ((zeros.to(tl.int32) | BASE_BITS) * 0x10001)[:, :, None, None]
        pairs = tl.inline_asm_elementwise(
            "sub.bf16x2 $0, $1, $2;" if dtype == tl.bfloat16 else "sub.f16x2 $0, $1, $2;",
            "=r,r,r",
            [pairs, offsets],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    if dtype == tl.float32:
        nibbles = tl.join(pairs & 0xFFFF, pairs >> 16).to(tl.float32)
        offset = zeros.to(tl.float32)
    else:
        lows = pairs.to(tl.int16).to(dtype, bitcast=True)
        highs = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
        nibbles = tl.join(lows, highs)
        offset = (zeros.to(tl.int16) | BASE_BITS).to(dtype, bitcast=True)
    # From [outputs, t, b, j, s].
    ordered = nibbles.reshape(BLOCK_OUTPUTS, 4, 4, 4, 2).permute(0, 2, 3, 1, 4)
    weights = ordered.reshape(BLOCK_OUTPUTS, 128)
    if not SUBTRACTS_PAIRS:
        weights -= offset
    return weights


@triton.jit
def _load_groups(ptrs, outputs, chunk, GROUP_SIZE: tl.constexpr, CHUNK_INPUTS: tl.constexpr):
    """The chunk's values for each group and output, to whose first groups ``ptrs`` point:
    [outputs, 1] if the chunk has only one group, or else [outputs, inputs]."""
    ptrs += chunk * CHUNK_INPUTS // GROUP_SIZE * outputs
    if GROUP_SIZE >= CHUNK_INPUTS:
        values = tl.load(ptrs)[:, None]
    else:
        NUM_GROUPS: tl.constexpr = CHUNK_INPUTS // GROUP_SIZE
        values = tl.load(ptrs[:, None] + tl.arange(0, NUM_GROUPS)[None, :] * outputs)
        values = values[:, :, None].broadcast_to(ptrs.shape[0], NUM_GROUPS, GROUP_SIZE)
        values = values.reshape(ptrs.shape[0], CHUNK_INPUTS)
    return values


@triton.jit
def _sum_parts(parts_ptr, size, places, num_splits, is_there, NUM_SPLITS: tl.constexpr):
    """In order, the values at ``places`` in parts of ``size`` values."""
    sums = tl.zeros(places.shape, tl.float32)
    if NUM_SPLITS:
        for part in tl.static_range(NUM_SPLITS):
            part_ptrs = parts_ptr + part * size + places
            sums += tl.load(part_ptrs, mask=is_there, other=0.0, cache_modifier=".cg")
    else:
        for part in tl.range(num_splits):
            part_ptrs = parts_ptr + part * size + places
            sums += tl.load(part_ptrs, mask=is_there, other=0.0, cache_modifier=".cg")
    return sums


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "split_chunks", "num_splits"])
def awq_linear_kernel(
    out_ptr,
    parts_ptr,
    counters_ptr,
    hidden_ptr,
    qweight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    num_tokens,
    outputs,
    num_chunks,
    split_chunks,
    num_splits,
    base_pair,
    BASE_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNK_INPUTS: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    WARP_ROWS: tl.constexpr,
    SCALES_WEIGHTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SUBTRACTS_PAIRS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    """A split of a tile of outputs and of tokens; the last split to finish adds up the parts.

    A load gives 8 adjacent rows to each of the warps in turn, WARP_ROWS to all; a matrix
    instruction takes 16 adjacent rows from a warp. Rows are therefore loaded in memory's order and
    renumbered. NUM_SPLITS is 0 if it is only known at run time. The order of the statements is the
    order that was measured; the machine code depends on it.
    """
    token_tile = tl.program_id(0)
    out_tile = tl.program_id(1)
    split = tl.program_id(2)
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    first_out = out_tile * BLOCK_OUTPUTS
    rows = tl.arange(0, BLOCK_OUTPUTS)
    # Arithmetic, so that the compiler sees that 8 of them are adjacent.
    eights = rows // 8 % 2 * WARP_ROWS + rows % (2 * WARP_ROWS) // 16 * 8
    outs = first_out + rows // (2 * WARP_ROWS) * (2 * WARP_ROWS) + eights + rows % 8
    # Outputs beyond the last output repeat it; their results are not stored.
    loaded_outs = tl.minimum(outs, outputs - 1)
    tokens = token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = tokens < num_tokens
    inputs = num_chunks * CHUNK_INPUTS
    chunk_inputs = tl.arange(0, CHUNK_INPUTS)
    hidden_ptrs = hidden_ptr + tokens.to(tl.int64)[None, :] * inputs + chunk_inputs[:, None]
    loaded_rows = tl.minimum(first_out + rows, outputs - 1)
    chunk_words = tl.arange(0, CHUNK_WORDS)
    words_ptrs = qweight_ptr + loaded_rows[:, None] * CHUNK_WORDS + chunk_words[None, :]
    total = tl.zeros([BLOCK_OUTPUTS, BLOCK_TOKENS], tl.float32)
    first = split * split_chunks
    last = tl.minimum(first + split_chunks, num_chunks)
    if HAS_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    zeros_ptrs = zeros_ptr + loaded_outs
    scales_ptrs = scales_ptr + loaded_outs
    zeros = _load_groups(zeros_ptrs, outputs, first, GROUP_SIZE, CHUNK_INPUTS)
    scales = _load_groups(scales_ptrs, outputs, first, GROUP_SIZE, CHUNK_INPUTS)
    for chunk in tl.range(first, last):
        # Values of 1 and 2 bytes cannot be copied to shared memory in advance, so they are loaded
        # an iteration early.
        next_chunk = tl.minimum(chunk + 1, num_chunks - 1)
        next_zeros = _load_groups(zeros_ptrs, outputs, next_chunk, GROUP_SIZE, CHUNK_INPUTS)
        next_scales = _load_groups(scales_ptrs, outputs, next_chunk, GROUP_SIZE, CHUNK_INPUTS)
        hidden = tl.load(hidden_ptrs + chunk * CHUNK_INPUTS, mask=is_token[None, :], other=0.0)
        words = tl.load(words_ptrs + chunk * outputs.to(tl.int64) * CHUNK_WORDS)
        words = words.reshape(BLOCK_OUTPUTS // (2 * WARP_ROWS), 2, WARP_ROWS // 8, 8, CHUNK_WORDS)
        words = words.permute(0, 2, 1, 3, 4).reshape(BLOCK_OUTPUTS, CHUNK_WORDS)
        weights = _unpack(words, zeros, base_pair, BASE_BITS, dtype, BLOCK_OUTPUTS, SUBTRACTS_PAIRS)
        if SCALES_WEIGHTS:
            weights *= scales.to(dtype)
            total = tl.dot(weights, hidden, total, input_precision="ieee")
        else:
            product = tl.dot(weights, hidden, input_precision="ieee")
            total += product * scales.to(tl.float32)
        zeros = next_zeros
        scales = next_scales
    is_there = is_token[None, :] & (outs < outputs)[:, None]
    places = tokens.to(tl.int64)[None, :] * outputs + outs[:, None]
    if NUM_SPLITS == 1:
        if HAS_BIAS:
            total += tl.load(bias_ptr + loaded_outs).to(tl.float32)[:, None]
        tl.store(out_ptr + places, total.to(dtype), mask=is_there)
    else:
        size = num_tokens.to(tl.int64) * outputs
        tl.store(parts_ptr + split * size + places, total, mask=is_there)
        # All threads' stores have to precede the release by one thread.
        tl.debug_barrier()
        counter_ptr = counters_ptr + token_tile * tl.num_programs(1) + out_tile
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_splits - 1:
            sums = _sum_parts(parts_ptr, size, places, num_splits, is_there, NUM_SPLITS)
            if HAS_BIAS:
                sums += tl.load(bias_ptr + loaded_outs).to(tl.float32)[:, None]
            tl.store(out_ptr + places, sums.to(dtype), mask=is_there)
            tl.store(counter_ptr, 0)


def _dequantize(
    qweight: Tensor, scales: Tensor, zeros: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Unpack the whole weight: [outputs, inputs]."""
    num_chunks, outputs, _ = qweight.shape
    weight = torch.empty(outputs, num_chunks * CHUNK_INPUTS, dtype=dtype, device=qweight.device)
    configuration = _dequantize_configuration(dtype, scales.dtype, group_size)
    grid = (num_chunks, triton.cdiv(outputs, _DEQUANTIZED_OUTPUTS))
    launch(configuration, grid, weight, qweight, scales, zeros, outputs, _base_pair(dtype))
    return weight


_DEQUANTIZED_OUTPUTS = 64


@triton.jit
def awq_dequantize_kernel(
    weight_ptr,
    qweight_ptr,
    scales_ptr,
    zeros_ptr,
    outputs,
    base_pair,
    BASE_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNK_INPUTS: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Unpack a chunk of a tile of outputs."""
    chunk = tl.program_id(0)
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    outs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_out = outs < outputs
    loaded_outs = tl.minimum(outs, outputs - 1)
    rows = chunk.to(tl.int64) * outputs + loaded_outs
    words = tl.load(qweight_ptr + rows[:, None] * CHUNK_WORDS + tl.arange(0, CHUNK_WORDS)[None, :])
    zeros = _load_groups(zeros_ptr + loaded_outs, outputs, chunk, GROUP_SIZE, CHUNK_INPUTS)
    scales = _load_groups(scales_ptr + loaded_outs, outputs, chunk, GROUP_SIZE, CHUNK_INPUTS)
    weights = _unpack(
        words, zeros, base_pair, BASE_BITS, dtype, BLOCK_OUTPUTS, SUBTRACTS_PAIRS=False
    )
    scaled = (weights.to(tl.float32) * scales.to(tl.float32)).to(dtype)
    inputs = chunk * CHUNK_INPUTS + tl.arange(0, CHUNK_INPUTS)
    places = outs.to(tl.int64)[:, None] * tl.num_programs(0) * CHUNK_INPUTS + inputs[None, :]
    tl.store(weight_ptr + places, scaled, mask=is_out[:, None])


@cache
def _configuration(
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    group_size: int,
    tile: _Tile,
    num_splits: int,
    *,
    has_bias: bool,
    uses_pdl: bool,
    target: int,
) -> Configuration:
    """Devices with programmatic dependent launch have instructions for pairs of bfloat16, too."""
    return Configuration(
        kernel=awq_linear_kernel,
        signature={
            "out_ptr": POINTER_TYPES[dtype],
            "parts_ptr": "*fp32:16",
            "counters_ptr": "*i32:16",
            "hidden_ptr": POINTER_TYPES[dtype],
            **_weight_pointers(scale_dtype),
            "bias_ptr": POINTER_TYPES[dtype],
            **dict.fromkeys(("num_tokens", "num_chunks", "split_chunks", "num_splits"), "i32"),
            **dict.fromkeys(("outputs", "base_pair"), "i32:16"),
        },
        constexprs={
            "BASE_BITS": _BASE_BITS[dtype],
            "GROUP_SIZE": group_size,
            "CHUNK_INPUTS": CHUNK_INPUTS,
            "CHUNK_WORDS": CHUNK_WORDS,
            "BLOCK_TOKENS": tile.tokens,
            "BLOCK_OUTPUTS": tile.outputs,
            "WARP_ROWS": 8 * tile.num_warps,
            "SCALES_WEIGHTS": tile.scales_weights or group_size < CHUNK_INPUTS,
            "NUM_SPLITS": num_splits,
            "SUBTRACTS_PAIRS": uses_pdl and group_size >= CHUNK_INPUTS and dtype != torch.float32,
            "HAS_BIAS": has_bias,
            "HAS_PDL": uses_pdl and tile.has_pdl,
        },
        num_warps=tile.num_warps,
        # Devices such as those of compute capability 8.0 have less shared memory.
        num_stages=2 if tile.tokens == 128 and target == TARGETS[0] else tile.num_stages,
        targets=pdl_targets(uses_pdl),
    )


@cache
def _dequantize_configuration(
    dtype: torch.dtype, scale_dtype: torch.dtype, group_size: int
) -> Configuration:
    return Configuration(
        kernel=awq_dequantize_kernel,
        signature={
            "weight_ptr": POINTER_TYPES[dtype],
            **_weight_pointers(scale_dtype),
            **dict.fromkeys(("outputs", "base_pair"), "i32:16"),
        },
        constexprs={
            "BASE_BITS": _BASE_BITS[dtype],
            "GROUP_SIZE": group_size,
            "CHUNK_INPUTS": CHUNK_INPUTS,
            "CHUNK_WORDS": CHUNK_WORDS,
            "BLOCK_OUTPUTS": _DEQUANTIZED_OUTPUTS,
        },
    )


def _weight_pointers(scale_dtype: torch.dtype) -> dict[str, str]:
    scales = POINTER_TYPES[scale_dtype]
    return {"qweight_ptr": "*i32:16", "scales_ptr": scales, "zeros_ptr": "*u8:16"}


def _configurations() -> Iterator[Configuration]:
    dtype, scale_dtype, small_groups = torch.bfloat16, torch.float16, CHUNK_INPUTS // 4
    for target in TARGETS[:2]:
        uses_pdl = target > TARGETS[0]
        configuration = partial(_configuration, has_bias=True, uses_pdl=uses_pdl, target=target)
        for tile in _TILES:
            for num_splits in (1, _MAX_UNROLLED if tile.has_unrolled_sum else 0):
                yield configuration(dtype, scale_dtype, CHUNK_INPUTS, tile, num_splits)
        yield configuration(dtype, scale_dtype, small_groups, _TILES[0], 4)
        yield configuration(torch.float32, scale_dtype, CHUNK_INPUTS, _FLOAT32_TILE, 0)
    yield _dequantize_configuration(dtype, scale_dtype, CHUNK_INPUTS)


CONFIGURATIONS = tuple(_configurations())

"""All processors compute the same bits, whatever instructions they have."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.native import library as module
from kernels.native.draw_rows import drawn_from
from kernels.native.filter_floors import floors_of
from kernels.native.library import TILE_FLAGS, Library, choose_products, choose_tiles
from kernels.native.most_likely import found_by
from kernels.native.packed import CodeBits, Rows, pack
from kernels.native.paged_attention import attend
from kernels.native.rank_logits import ranked_by
from tests.kernels.attention import Case, Tensors
from tests.kernels.attention import build as build_case
from tests.kernels.native.test_linear import (
    CODE_BITS,
    FORMATS,
    NUM_ROWS,
    linear,
    matrix,
    rows,
    unpack_rows,
)
from tests.kernels.native.test_sampling import SIZES, filters
from tests.kernels.native.test_sampling import rows as logits_of
from tests.support.models.native import variants

DENORMAL = 1e-40
ODD_NUMBERS = [DENORMAL, 1e38, torch.inf, torch.nan]
LENGTHS = (1, 33, 150)


def assert_same_bits(compute: Callable[[Library], Tensor]) -> None:
    """A NaN has the same bits as any other, because no token depends on them."""
    (first, expected), *others = [(name, compute(library)) for name, library in variants().items()]
    for name, actual in others:
        is_same = (actual == expected) | (actual.isnan() & expected.isnan())
        assert is_same.all(), f"{int((~is_same).sum())} of {name} differ from {first}"


@pytest.mark.parametrize("size", [(1, 256), (37, 512), (160, 768), (96, 2304)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("code_bits", CODE_BITS)
def test_products(code_bits: CodeBits, name: str, size: tuple[int, int]) -> None:
    weight, bias = matrix(name, *size), torch.randn(size[0])
    for num_rows in NUM_ROWS:
        hidden = rows(num_rows, size[1])
        assert_same_bits(partial(_packed_product, hidden, weight, bias, code_bits))


def _packed_product(
    hidden: Tensor, weight: Rows, bias: Tensor, code_bits: CodeBits, library: Library
) -> Tensor:
    packed = pack(library, [weight], bias)
    return linear(library, hidden, packed, code_bits=code_bits)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_products_of_sizes_that_fill_no_vector(name: str) -> None:
    weight, hidden = matrix(name, 17, 34), rows(9, 34)
    assert_same_bits(lambda library: linear(library, hidden, pack(library, [weight])))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("code_bits", CODE_BITS)
@pytest.mark.parametrize("odd", ODD_NUMBERS)
def test_products_of_numbers_at_the_limits(odd: float, code_bits: CodeBits, name: str) -> None:
    weight, hidden = matrix(name, 37, 512), rows(12, 512)
    hidden[:, 3], hidden[3] = odd, odd * hidden[3].sign()
    if weight.data.is_floating_point():
        weight.data[5, 7], weight.data[6] = odd, DENORMAL
    assert_same_bits(
        lambda library: linear(library, hidden, pack(library, [weight]), code_bits=code_bits)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_embeddings(name: str) -> None:
    weight, index = matrix(name, 37, 512), torch.tensor([0, 36, 15, 16])
    assert_same_bits(lambda library: unpack_rows(library, pack(library, [weight]), index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 48, 64])
@pytest.mark.parametrize(
    "kind", [{}, {"sliding_window": 50}, {"has_slopes": True}], ids=["all", "window", "slopes"]
)
def test_attention(kind: dict[str, Any], head_dim: int, dtype: torch.dtype) -> None:
    case = Case(LENGTHS, (1, 20, 150), 6, head_dim=head_dim, dtype=dtype, **kind)
    assert_same_bits(partial(_attended, build_case(case), case.spec))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", ODD_NUMBERS)
def test_attention_to_numbers_at_the_limits(odd: float, dtype: torch.dtype) -> None:
    case = Case(LENGTHS, (1, 20, 150), 6, head_dim=48, dtype=dtype)
    tensors = build_case(case)
    tensors.query[:, 1, 3] = tensors.key_cache[2, 5] = tensors.value_cache[3, 7] = odd
    assert_same_bits(partial(_attended, tensors, case.spec))


def _attended(tensors: Tensors, spec: AttentionSpec, library: Library) -> Tensor:
    return attend(
        library,
        tensors.query.float(),
        tensors.key_cache,
        tensors.value_cache,
        tensors.block_tables,
        tensors.query_starts,
        tensors.context_lens,
        spec=spec,
    )


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("odd", [0.0, -torch.inf, *ODD_NUMBERS])
def test_draws(odd: float, vocab_size: int) -> None:
    logits, (temperatures, *limits) = logits_of(vocab_size, 4.0), filters(vocab_size)
    logits[:, 1::3] = odd  # not the first, so that a token is left
    uniforms = torch.rand(len(logits), generator=torch.Generator().manual_seed(2))

    def floors(library: Library) -> Tensor:
        return floors_of(library, logits, temperatures, *limits)

    assert_same_bits(floors)
    assert_same_bits(
        lambda library: drawn_from(library, logits, temperatures, floors(library), uniforms),
    )
    assert_same_bits(lambda library: found_by(library, logits))
    assert_same_bits(lambda library: ranked_by(library, logits, 1)[0])
    assert_same_bits(lambda library: ranked_by(library, logits, 1)[2])


def test_the_choice_between_instructions_does_not_show_in_a_product() -> None:
    weight, hidden = matrix("bfloat16", 160, 96), rows(13, 96)
    library = variants()["avx512 in halves, bfloat16 products"]
    expected = linear(library, hidden, pack(library, [weight]))

    choose_products(library)

    assert torch.equal(linear(library, hidden, pack(library, [weight])), expected)


def test_a_processor_without_the_instruction_does_not_use_it() -> None:
    assert not choose_products(variants()["avx2"])


EMULATED = "avx512 in halves, bfloat16 products"


def with_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processor have the registers."""
    monkeypatch.setattr(module, "cpu_flags", lambda: TILE_FLAGS | {"avx512f"})


def test_tile_registers_are_used_once_they_have_computed_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_tiles(monkeypatch)

    assert choose_tiles(variants()[EMULATED])
    assert not choose_tiles(variants()["avx2"])


def test_tile_registers_that_compute_other_bits_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_tiles(monkeypatch)
    library = variants()[EMULATED]
    products = iter([torch.zeros(1), torch.ones(1)])
    monkeypatch.setattr(module, "_q8_0_product", lambda _: next(products))

    is_used = choose_tiles(library)

    assert not is_used
    assert "tile registers not used" in caplog.text
    library.use_tiles(is_used=True)  # as before, for other tests


def test_a_processor_without_tile_registers_is_not_asked_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset({"avx512f", "amx_tile"}))

    assert not choose_tiles(variants()[EMULATED])

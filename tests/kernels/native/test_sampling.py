"""Filters and draws without sorting, against float64."""

import pytest
import torch
from torch import Tensor

from kernels.native.draw_rows import drawn_from
from kernels.native.filter_floors import floors_of
from kernels.native.library import Library
from kernels.native.most_likely import found_by
from kernels.reference.most_likely import NO_TOKEN

NUM_ROWS = 48
SIZES = [1, 7, 1000, 1024, 50_001]
ROUNDING = 2e-6


def rows(vocab_size: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(NUM_ROWS, vocab_size, generator=generator) * spread


def filters(vocab_size: int) -> list[Tensor]:
    """Temperatures, and all combinations of filters that exclude many, few and no tokens."""
    generator = torch.Generator().manual_seed(vocab_size + 1)

    def chosen(values: list[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (NUM_ROWS,), generator=generator)]

    return [
        chosen([0.05, 0.7, 1.0, 3.0]),
        chosen([0, 0, 1, 5, 50, 5000]).long(),
        chosen([1.0, 1.0, 0.999, 0.9, 0.3, 1e-6]),
        chosen([0.0, 0.0, 0.001, 0.1, 1.0]),
    ]


def exactly_kept(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """Like `kernels.reference.filter_floors`, but in float64, because the reference sums in
    float32."""
    num_kept = top_ks.where(top_ks > 0, logits.shape[1])[:, None]
    scaled, order = (logits.double() / temperatures[:, None]).sort(dim=1, descending=True)
    weights = (scaled - scaled[:, :1]).exp()
    is_kept = torch.arange(logits.shape[1]) < num_kept
    shares = weights * is_kept / (weights * is_kept).sum(1, keepdim=True)
    before = shares.cumsum(1) - shares
    is_kept &= (before < top_ps[:, None]) | (top_ps[:, None] == 1)
    is_kept &= weights >= min_ps[:, None]
    is_kept[:, 0] = True
    return torch.zeros_like(is_kept).scatter(1, order, is_kept)


@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_floors_keep_exactly_what_the_filters_say(
    native: Library, vocab_size: int, spread: float
) -> None:
    logits, params = rows(vocab_size, spread), filters(vocab_size)

    floors = floors_of(native, logits, *params)

    kept, expected = logits >= floors.unsqueeze(1), exactly_kept(logits, *params)
    is_counted = params[2] == 1
    assert torch.equal(kept[is_counted], expected[is_counted])
    weights = (logits / params[0].unsqueeze(1)).softmax(1)
    assert (weights * (kept ^ expected)).sum(1).max() < ROUNDING


@pytest.mark.parametrize("min_p", [0.0, 0.1])
@pytest.mark.parametrize("top_k", [0, 50])
@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-37, 1e-20])
def test_the_smallest_temperatures_keep_the_most_likely_token(
    native: Library, temperature: float, top_k: int, min_p: float
) -> None:
    logits = rows(1000, 3.0)
    params = (temperature, 0.9, min_p)
    temperatures, top_ps, min_ps = (torch.full((NUM_ROWS,), value) for value in params)

    floors = floors_of(native, logits, temperatures, torch.full((NUM_ROWS,), top_k), top_ps, min_ps)

    assert torch.equal(floors, logits.amax(dim=1))


def test_fewer_tokens_than_top_k_are_all_kept(native: Library) -> None:
    logits = torch.full((NUM_ROWS, 1000), -torch.inf)
    logits[:, :3] = rows(3, 3.0)
    ones, top_ks = torch.ones(NUM_ROWS), torch.full((NUM_ROWS,), 20)

    floors = floors_of(native, logits, ones, top_ks, ones, torch.zeros(NUM_ROWS))

    assert (floors == -torch.inf).all()


@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_number_draws_the_token_whose_share_of_the_line_it_meets(
    native: Library, vocab_size: int, spread: float
) -> None:
    logits, (temperatures, *_) = rows(vocab_size, spread), filters(vocab_size)
    floors = logits.quantile(0.5, dim=1)
    uniforms = torch.arange(NUM_ROWS) / NUM_ROWS

    drawn = drawn_from(native, logits, temperatures, floors, uniforms).unsqueeze(1)

    scaled = (logits.double() - logits.double().max(1, keepdim=True).values) / temperatures[:, None]
    weights = scaled.exp() * (logits >= floors.unsqueeze(1))
    line = weights.cumsum(1) / weights.sum(1, keepdim=True)
    end = line.gather(1, drawn).squeeze(1)
    start = end - (weights / weights.sum(1, keepdim=True)).gather(1, drawn).squeeze(1)
    assert (start <= uniforms + ROUNDING).all()
    assert (end >= uniforms - ROUNDING).all()
    assert (weights.gather(1, drawn) > 0).all()


@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_most_likely_token_is_the_first_of_the_greatest(
    native: Library, vocab_size: int
) -> None:
    logits = rows(vocab_size, 1.0).round()

    greatest = logits.max(1, keepdim=True).values
    expected = [row.index(True) for row in (logits == greatest).tolist()]
    assert found_by(native, logits).tolist() == expected


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", range(40))
def test_what_is_no_number_has_no_token_wherever_it_is(
    native: Library, odd: float, place: int
) -> None:
    logits = torch.randn(4, 40)
    logits[:, place] = odd
    ones = torch.ones(4)
    params = [ones, torch.tensor([0, 3, 0, 0]), torch.tensor([0.9, 1, 1, 0.5]), ones * 0.1]

    floors = floors_of(native, logits, *params)

    assert drawn_from(native, logits, ones, floors, ones * 0.5).tolist() == [NO_TOKEN] * 4
    assert found_by(native, logits).tolist() == [NO_TOKEN] * 4

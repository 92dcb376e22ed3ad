"""Sampling in Triton against the reference, over rows of several blocks, alone and in a batch."""

import pytest
import torch
from torch import Tensor

from kernels.providers import Ops, load_ops

NUM_ROWS, VOCAB_SIZE = 8, 8192 + 4096 + 77
REFERENCE = load_ops()


def rows_of_params(device: torch.device) -> tuple[Tensor, ...]:
    """Logits, temperatures, top-k, top-p and min-p, with every combination of filters."""
    torch.manual_seed(8)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE) * 3
    logits[:, 5:300] = -torch.inf
    temperatures = torch.rand(NUM_ROWS) + 0.3
    row = torch.arange(NUM_ROWS)
    top_ks = torch.where(row % 2 == 1, 7 + 300 * row, 0)
    top_ps = torch.where(row // 2 % 2 == 1, 0.9, 1.0)
    min_ps = torch.where(row // 4 % 2 == 1, 0.01, 0.0)
    return tuple(t.to(device) for t in (logits, temperatures, top_ks, top_ps, min_ps))


def test_floors_are_those_of_the_reference(triton_ops: Ops, device: torch.device) -> None:
    given = rows_of_params(device)
    expected = REFERENCE.filter_floors(*given)
    # Tokens at -inf are never drawn.
    least = torch.finfo(torch.float32).min
    assert torch.equal(triton_ops.filter_floors(*given), expected.clamp(min=least))


def test_many_tokens_as_likely_as_each_other(triton_ops: Ops, device: torch.device) -> None:
    logits = torch.arange(9, device=device).repeat(1, 5).float()
    one = torch.ones(1, device=device)
    for top_k in (1, 5, 6, 17, 45):
        given = (logits, one, torch.tensor([top_k], device=device), one * 0.8, one * 0.0)
        assert torch.equal(triton_ops.filter_floors(*given), REFERENCE.filter_floors(*given))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_search_ends_for_logits_that_are_no_numbers(
    triton_ops: Ops, device: torch.device, bad: float
) -> None:
    logits, *params = rows_of_params(device)
    logits[:, 9000] = bad
    assert triton_ops.filter_floors(logits, *params).shape == (NUM_ROWS,)


def test_tokens_are_those_of_the_reference(triton_ops: Ops, device: torch.device) -> None:
    logits, temperatures, *filters = rows_of_params(device)
    floors = REFERENCE.filter_floors(logits, temperatures, *filters)
    temperatures[3] = 0
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-24, 0.3, 0.7, 0.1, 0.9, 0.99], device=device)
    given = (logits, temperatures, floors, uniforms)
    drawn = triton_ops.draw_rows(*given)
    assert torch.equal(drawn, REFERENCE.draw_rows(*given))
    for row in range(NUM_ROWS):
        alone = [tensor[row : row + 1] for tensor in given]
        assert torch.equal(triton_ops.draw_rows(*alone), drawn[row : row + 1])


def test_draws_follow_the_softmax(triton_ops: Ops, device: torch.device) -> None:
    """Each token is drawn for its share of evenly spaced numbers, up to a number at its borders."""
    torch.manual_seed(9)
    row = torch.randn(13, device=device)
    count = 64
    full = torch.full((count,), 1.3, device=device)
    uniforms = torch.arange(count, device=device) / count
    drawn = triton_ops.draw_rows(row.expand(count, -1), full, full - torch.inf, uniforms)
    shares = (row.double() / 1.3).softmax(dim=0) * count
    assert ((drawn.bincount(minlength=13) - shares).abs() <= 1).all()

"""Which tokens may be drawn, and which one is."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.providers import Ops

VOCAB_SIZE = 101


def naive_kept(row: Tensor, temperature: float, top_k: int, top_p: float) -> set[int]:
    """Walk the tokens from the most likely down."""
    order = sorted(range(len(row)), key=lambda token: -float(row[token]))
    order = order[: top_k or None]
    weights = [float(((row[t] - row[order[0]]).double() / temperature).exp()) for t in order]
    kept: set[int] = set()
    mass = 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= top_p * sum(weights) and top_p < 1:
            break
        kept.add(token)
        mass += weight
    return kept


PARAMS = [
    (0.7, 5, 1.0),
    (1.0, 0, 0.9),
    (1.3, 40, 0.5),
    (2.0, 1, 1.0),
    (1.0, 0, 1e-6),
    (0.3, 0, 1.0),
]


def check_floors(ops: Ops) -> None:
    torch.manual_seed(3)
    logits = torch.randn(len(PARAMS), VOCAB_SIZE) * 3
    temperatures, top_ks, top_ps = (torch.tensor(column) for column in zip(*PARAMS, strict=True))

    floors = ops.filter_floors(logits, temperatures, top_ks, top_ps)

    for row, params in enumerate(PARAMS):
        kept = set(torch.nonzero(logits[row] >= floors[row]).flatten().tolist())
        assert kept == naive_kept(logits[row], *params)


def test_floors_keep_what_top_k_and_top_p_say(ops: Ops) -> None:
    check_floors(ops)


FAULTS: dict[str, Callable[[Ops], Ops]] = {
    "temperature is left out": lambda ops: replace(
        ops, filter_floors=lambda x, t, k, p: ops.filter_floors(x, torch.ones_like(t), k, p)
    ),
    "one token too many": lambda ops: replace(
        ops, filter_floors=lambda x, t, k, p: ops.filter_floors(x, t, k + k.gt(0), p)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_in_the_floors_is_caught(ops: Ops, fault: str) -> None:
    with pytest.raises(AssertionError):
        check_floors(FAULTS[fault](ops))


def test_tokens_as_likely_as_the_last_one_kept_stay(ops: Ops) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    floors = ops.filter_floors(logits, torch.ones(1), torch.tensor([2]), torch.ones(1))
    assert (logits >= floors).tolist() == [[True, True, True, False]]


def draw(ops: Ops, logits: Tensor, temperature: float, uniforms: list[float]) -> list[int]:
    rows = len(uniforms)
    tokens = ops.draw_rows(
        logits.expand(rows, -1),
        torch.full((rows,), temperature),
        torch.full((rows,), -torch.inf),
        torch.tensor(uniforms),
    )
    return tokens.tolist()


def test_a_number_draws_the_token_whose_share_of_the_line_it_meets(ops: Ops) -> None:
    logits = torch.tensor([0.25, 0.0, 0.5, 0.25]).log()
    assert draw(ops, logits, 1.0, [0.0, 0.24, 0.26, 0.74, 0.76, 1 - 2**-24]) == [0, 0, 2, 2, 3, 3]


def test_a_token_without_weight_is_never_drawn(ops: Ops) -> None:
    """Also not at the row's end, where the sum is rounded."""
    logits = torch.cat((torch.full((50_000,), -0.1), torch.full((1000,), -torch.inf)))
    assert draw(ops, logits, 1.0, [1 - 2**-24]) == [49_999]


def test_temperature_zero_is_greedy_and_a_tiny_one_nearly_is(ops: Ops) -> None:
    logits = torch.tensor([80.0, -90.0, 81.0, 3.0])
    assert draw(ops, logits, 0.0, [0.0, 0.99]) == [2, 2]
    assert draw(ops, logits, 1e-30, [0.0, 0.99]) == [2, 2]


def test_what_lies_below_the_floor_is_not_drawn(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 5.0, 1.5]]).expand(64, -1)
    floors = torch.full((64,), 1.5)
    uniforms = torch.arange(64) / 64
    tokens = ops.draw_rows(logits, torch.full((64,), 2.0), floors, uniforms)
    assert set(tokens.tolist()) == {1, 2}


def test_nan_logits_still_give_a_token_of_the_vocabulary(ops: Ops) -> None:
    assert draw(ops, torch.full((7,), torch.nan), 1.0, [0.5])[0] in range(7)


def test_shapes_that_do_not_fit_are_refused_with_both(ops: Ops) -> None:
    ones = torch.ones(2)
    with pytest.raises(ValueError, match=r"floors has shape \[3\], expected \[2\]"):
        ops.draw_rows(torch.ones(2, 5), ones, torch.ones(3), ones)
    with pytest.raises(ValueError, match=r"top_ks has shape \[1\], expected \[2\]"):
        ops.filter_floors(torch.ones(2, 5), ones, torch.ones(1).long(), ones)

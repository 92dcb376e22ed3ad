"""The tokens that may be drawn, and the token that is drawn."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.providers import Ops
from kernels.reference.most_likely import NO_TOKEN
from tests.support.models.numerics import assert_close

VOCAB_SIZE = 101


@pytest.fixture
def ops(provided_ops: Ops) -> Ops:
    return provided_ops


def naive_kept(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Visit the tokens from the most likely token down."""
    order = sorted(range(len(row)), key=lambda token: -float(row[token]))
    order = order[: top_k or None]
    weights = [float(((row[t] - row[order[0]]).double() / temperature).exp()) for t in order]
    kept: set[int] = set()
    mass = 0.0
    for token, weight in zip(order, weights, strict=True):
        if (mass >= top_p * sum(weights) and top_p < 1) or weight < min_p:
            break
        kept.add(token)
        mass += weight
    return kept


PARAMS = [
    (0.7, 5, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 40, 0.5, 0.0),
    (2.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1.7, 0, 1.0, 0.1),
    (2.0, 60, 0.95, 0.02),
    (1.5, 0, 0.99, 0.3),
    (1.5, 3, 1.0, 1.0),
]


def check_floors(ops: Ops) -> None:
    torch.manual_seed(3)
    logits = torch.randn(len(PARAMS), VOCAB_SIZE) * 3
    params = [torch.tensor(column) for column in zip(*PARAMS, strict=True)]

    floors = ops.filter_floors(logits, *params)

    for row, of_row in enumerate(PARAMS):
        kept = set(torch.nonzero(logits[row] >= floors[row]).flatten().tolist())
        assert kept == naive_kept(logits[row], *of_row)


def test_floors_keep_what_the_filters_say(ops: Ops) -> None:
    check_floors(ops)


FAULTS: dict[str, Callable[[Ops], Ops]] = {
    "temperature is left out": lambda ops: ops.replace(
        filter_floors=lambda x, t, *rest: ops.filter_floors(x, torch.ones_like(t), *rest)
    ),
    "one token too many": lambda ops: ops.replace(
        filter_floors=lambda x, t, k, *rest: ops.filter_floors(x, t, k + k.gt(0), *rest)
    ),
    "min-p is left out": lambda ops: ops.replace(
        filter_floors=lambda x, t, k, p, m: ops.filter_floors(x, t, k, p, m * 0)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_in_the_floors_is_caught(ops: Ops, fault: str) -> None:
    with pytest.raises(AssertionError):
        check_floors(FAULTS[fault](ops))


def test_tokens_as_likely_as_the_last_one_kept_stay(ops: Ops) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    top_ks, ones = torch.tensor([2]), torch.ones(1)
    floors = ops.filter_floors(logits, ones, top_ks, ones, torch.zeros(1))
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
    """Even at the end of a row, where the sum is rounded."""
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


@pytest.mark.parametrize("depth", [0, 1, 5, 40])
def test_ranks_are_the_highest_logits_and_their_total(ops: Ops, depth: int) -> None:
    torch.manual_seed(depth)
    logits = torch.randn(3, 1000)
    logits[2] = torch.arange(1000)

    totals, top, tokens = ops.rank_logits(logits, depth)

    assert_close(totals, logits.double().logsumexp(dim=-1), 1e-6)
    expected = logits.sort(dim=-1, descending=True)
    assert torch.equal(top, expected.values[:, :depth])
    assert torch.equal(tokens, expected.indices[:, :depth])


ODD_ROWS: dict[str, Callable[[Tensor], object]] = {
    "one NaN": lambda row: row[97:98].fill_(torch.nan),
    "a NaN before the highest": lambda row: row[:2].copy_(torch.tensor([torch.nan, 9.0])),
    "infinity": lambda row: row[50:51].fill_(torch.inf),
    "NaN alone": lambda row: row.fill_(torch.nan),
    "minus infinity alone": lambda row: row.fill_(-torch.inf),
}


@pytest.mark.parametrize("odd", ODD_ROWS)
def test_a_row_that_is_not_finite_has_no_token_and_no_score(ops: Ops, odd: str) -> None:
    torch.manual_seed(4)
    logits = torch.randn(3, VOCAB_SIZE)
    ones, floors = torch.ones(3), torch.full((3,), -torch.inf)
    expected = [op(ops, logits, ones, floors) for op in DRAWS]
    ODD_ROWS[odd](logits[1])

    for op, tokens in zip(DRAWS, expected, strict=True):
        assert op(ops, logits, ones, floors) == [tokens[0], NO_TOKEN, tokens[2]]
    totals, _, _ = ops.rank_logits(logits, 2)
    assert totals.isnan().tolist() == [False, True, False]


DRAWS: list[Callable[[Ops, Tensor, Tensor, Tensor], list[int]]] = [
    lambda ops, logits, ones, floors: ops.most_likely(logits).tolist(),
    lambda ops, logits, ones, floors: ops.draw_rows(logits, ones * 0, floors, ones * 0.3).tolist(),
    lambda ops, logits, ones, floors: ops.draw_rows(logits, ones, floors, ones * 0.3).tolist(),
    lambda ops, logits, ones, floors: ops.draw_rows(
        logits,
        ones,
        ops.filter_floors(logits, ones, ones.long() * 5, ones * 0.9, ones * 0.01),
        ones * 0.3,
    ).tolist(),
]


def test_banned_tokens_leave_a_row_finite(ops: Ops) -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, 77] = -3.0
    assert ops.most_likely(logits).tolist() == [77]
    assert draw(ops, logits[0], 1.0, [0.0, 0.999]) == [77, 77]


def test_the_most_likely_token_is_the_first_of_the_highest(ops: Ops) -> None:
    torch.manual_seed(5)
    logits = torch.randn(20, 9000).round()
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert ops.most_likely(logits).tolist() == expected


def check_adjusted(ops: Ops) -> None:
    """An entry for each chosen token: its penalty, then its bias."""
    torch.manual_seed(6)
    logits = torch.randn(4, VOCAB_SIZE)
    entries = {(0, 3): (1.3, 0.0), (0, 100): (2.0, -0.5), (2, 0): (1.0, -torch.inf)}
    entries |= {(3, token): (0.5, 1.0) for token in range(40)}
    expected = logits.tolist()
    for (row, token), (repetition, bias) in entries.items():
        logit = expected[row][token]
        expected[row][token] = logit / repetition if logit > 0 else logit * repetition
        expected[row][token] += bias
    rows, token_ids = torch.tensor(list(entries)).T
    repetitions, biases = torch.tensor(list(entries.values())).T

    adjusted = ops.adjust_logits(logits, rows, token_ids, repetitions, biases)

    assert torch.equal(adjusted.isinf(), torch.tensor(expected).isinf())
    finite = torch.tensor(expected).clamp(min=-99)
    assert_close(adjusted.clamp(min=-99), finite, 1e-6)


def test_entries_penalize_and_bias_their_tokens_and_no_other(ops: Ops) -> None:
    check_adjusted(ops)


@pytest.mark.parametrize("place", range(1, 5))
def test_entries_of_others_are_caught(ops: Ops, place: int) -> None:
    def faulty(
        logits: Tensor, rows: Tensor, token_ids: Tensor, repetitions: Tensor, biases: Tensor
    ) -> Tensor:
        given = [logits, rows, token_ids, repetitions, biases]
        given[place] = given[place].roll(1)
        return ops.adjust_logits(*given)

    with pytest.raises(AssertionError):
        check_adjusted(ops.replace(adjust_logits=faulty))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 101])
def test_masked_rows_keep_the_tokens_with_a_bit(ops: Ops, vocab_size: int) -> None:
    torch.manual_seed(7)
    logits = torch.randn(5, vocab_size)
    rows = [4, 1, 2]
    allowed = torch.rand(len(rows), vocab_size) < 0.5
    masks = torch.zeros(len(rows), -(-vocab_size // 32), dtype=torch.int64)
    for row, token in torch.nonzero(allowed).tolist():
        masks[row, token // 32] += 1 << token % 32
    expected = logits.clone()
    for row, is_allowed in zip(rows, allowed, strict=True):
        expected[row] = torch.where(is_allowed, logits[row], -torch.inf)

    # The highest bit is a word's sign.
    words = masks.where(masks < 1 << 31, masks - (1 << 32)).int()
    assert torch.equal(ops.mask_logits(logits, torch.tensor(rows), words), expected)


def test_nothing_to_change_changes_nothing(ops: Ops) -> None:
    logits = torch.randn(2, VOCAB_SIZE)
    expected = logits.clone()
    none, empty = torch.zeros(0).long(), torch.zeros(0)
    assert torch.equal(ops.adjust_logits(logits, none, none, empty, empty), expected)
    masks = torch.zeros(0, 4, dtype=torch.int32)
    assert torch.equal(ops.mask_logits(logits, none, masks), expected)


def test_shapes_that_do_not_fit_are_refused_with_both(ops: Ops) -> None:
    ones = torch.ones(2)
    with pytest.raises(ValueError, match=r"floors has shape \[3\], expected \[2\]"):
        ops.draw_rows(torch.ones(2, 5), ones, torch.ones(3), ones)
    with pytest.raises(ValueError, match=r"top_ks has shape \[1\], expected \[2\]"):
        ops.filter_floors(torch.ones(2, 5), ones, torch.ones(1).long(), ones, ones)
    rows = torch.zeros(2).long()
    with pytest.raises(ValueError, match=r"token_ids has shape \[1\], expected \[2\]"):
        ops.adjust_logits(torch.ones(2, 5), rows, rows[:1], ones, ones)
    with pytest.raises(ValueError, match=r"masks has shape \[2, 2\], expected \[2, 1\]"):
        ops.mask_logits(torch.ones(2, 5), rows, torch.zeros(2, 2).int())

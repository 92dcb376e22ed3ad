"""Paged attention of every provider against a softmax for each token and head, in float64."""

from dataclasses import replace

import pytest
import torch

from kernels.providers import Ops
from tests.kernels.attention import (
    CASES,
    FAULTS,
    MAX_RELATIVE_ERROR,
    Case,
    alone,
    attend,
    build,
    check,
)
from tests.support.models.numerics import assert_close


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(ops: Ops, name: str) -> None:
    check(ops.paged_attention, CASES[name])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(ops: Ops, fault: str) -> None:
    case, plant = FAULTS[fault]
    with pytest.raises(AssertionError, match="relative error"):
        check(ops.paged_attention, CASES[case], plant)


@pytest.mark.parametrize("window", [None, 50])
def test_a_sequence_is_computed_alike_alone_and_in_any_company(
    ops: Ops, window: int | None
) -> None:
    case = Case((150, 70, 3, 130, 90), (1, 1, 1, 40, 90), sliding_window=window)
    tensors = build(case)
    together = attend(ops.paged_attention, case, tensors)
    for row in range(len(case.context_lens)):
        tokens = slice(*tensors.query_starts[row : row + 2].tolist())
        # The reference is exempt: its bits come from torch's own matrix products.
        bound = MAX_RELATIVE_ERROR[case.dtype] if ops.provider == "reference" else 0
        assert_close(
            attend(ops.paged_attention, *alone(case, tensors, row)), together[tokens], bound
        )


def test_shapes_that_do_not_fit_are_refused_with_both(ops: Ops) -> None:
    case = CASES["first token"]
    tensors = build(case)
    with pytest.raises(ValueError, match="5 query heads are not a multiple of 2 key heads"):
        attend(ops.paged_attention, case, replace(tensors, query=torch.ones(1, 5, 16)))
    with pytest.raises(ValueError, match=r"query_starts has shape \[3\], expected \[2\]"):
        attend(ops.paged_attention, case, replace(tensors, query_starts=torch.zeros(3).int()))

"""Element-wise ops and the output projection, against float64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.providers import Ops
from tests.support.models.numerics import assert_close

MAX_RELATIVE_ERROR = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", MAX_RELATIVE_ERROR)
EPS = 1e-5


@pytest.fixture
def ops(provided_ops: Ops) -> Ops:
    torch.manual_seed(0)
    return provided_ops


def check_rms_norm(ops: Ops, dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(5, 33).to(dtype), torch.randn(33).to(dtype)
    expected = torch.stack([naive_norm(row, weight) for row in hidden])
    assert_close(ops.rms_norm(hidden, weight, EPS), expected, MAX_RELATIVE_ERROR[dtype])


def check_add_rms_norm(ops: Ops, dtype: torch.dtype) -> None:
    hidden, residual = torch.randn(2, 7, 33).to(dtype)
    weight = torch.randn(33).to(dtype)
    total = (hidden.double() + residual.double()).to(dtype)
    normed, new_residual = ops.add_rms_norm(hidden.clone(), residual.clone(), weight, EPS)
    expected = torch.stack([naive_norm(row, weight) for row in total])
    assert_close(normed, expected, MAX_RELATIVE_ERROR[dtype])
    assert_close(new_residual, total, MAX_RELATIVE_ERROR[dtype])


def check_silu_mul(ops: Ops, dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * 17).to(dtype)
    gate, up = gate_up[:, :17].double(), gate_up[:, 17:].double()
    expected = gate / (1 + (-gate).exp()) * up
    assert_close(ops.silu_mul(gate_up), expected, MAX_RELATIVE_ERROR[dtype])


def check_logits(ops: Ops, dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(3, 17).to(dtype), torch.randn(61, 17).to(dtype)
    expected = (hidden.double()[:, None] * weight.double()).sum(dim=-1)
    actual = ops.logits(hidden, weight)
    assert actual.dtype == torch.float32
    assert_close(actual, expected, MAX_RELATIVE_ERROR[dtype])
    # The most likely tokens are not rounded to the weights' dtype, so that they do not tie.
    assert_close(actual.topk(8).values, expected.topk(8).values, MAX_RELATIVE_ERROR[torch.float32])


def naive_norm(row: Tensor, weight: Tensor) -> Tensor:
    mean_square = sum(x * x for x in row.double().tolist()) / len(row)
    return row.double() / math.sqrt(mean_square + EPS) * weight.double()


CHECKS: dict[str, Callable[[Ops, torch.dtype], None]] = {
    "rms_norm": check_rms_norm,
    "add_rms_norm": check_add_rms_norm,
    "silu_mul": check_silu_mul,
    "logits": check_logits,
}


@DTYPES
@pytest.mark.parametrize("op", CHECKS)
def test_agrees_with_float64(ops: Ops, op: str, dtype: torch.dtype) -> None:
    is_triton = getattr(ops, op).__module__.startswith("kernels.triton")
    if is_triton and op == "logits" and dtype == torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices wrongly")
    torch.manual_seed(1)
    CHECKS[op](ops, dtype)


FAULTS: dict[str, Callable[[Ops], Ops]] = {
    "rms_norm": lambda ops: ops.replace(rms_norm=lambda h, w, eps: ops.rms_norm(h, w, 0.1)),
    "add_rms_norm": lambda ops: ops.replace(
        add_rms_norm=lambda h, r, w, eps: (ops.add_rms_norm(h, r.clone(), w, eps)[0], r)
    ),
    "silu_mul": lambda ops: ops.replace(silu_mul=lambda x: ops.silu_mul(x.roll(17, dims=-1))),
    "logits": lambda ops: ops.replace(logits=lambda h, w: ops.logits(h, w).bfloat16().float()),
}


@DTYPES
@pytest.mark.parametrize("op", FAULTS)
def test_a_planted_fault_is_caught(ops: Ops, op: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    with pytest.raises(AssertionError, match="relative error"):
        CHECKS[op](FAULTS[op](ops), dtype)


def test_shapes_that_do_not_fit_are_refused_with_both(ops: Ops) -> None:
    with pytest.raises(ValueError, match=r"weight has shape \[4\], expected \[3\]"):
        ops.rms_norm(torch.ones(2, 3), torch.ones(4), EPS)
    with pytest.raises(ValueError, match=r"residual has shape \[1, 3\], expected \[2, 3\]"):
        ops.add_rms_norm(torch.ones(2, 3), torch.ones(1, 3), torch.ones(3), EPS)
    heads, key, index = torch.ones(2, 3, 4), torch.ones(2, 1, 4), torch.zeros(2).long()
    cache = torch.ones(1, 2, 1, 4)
    with pytest.raises(ValueError, match=r"rope_table has shape \[9, 6\], expected \[\*, 4\]"):
        ops.rope_store_kv(heads, key, key, index, torch.ones(9, 6), cache, cache, index)
    with pytest.raises(
        ValueError, match=r"gate_up has shape \[2, 3\], expected \[\*, 2 \* width\]"
    ):
        ops.silu_mul(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"weight has shape \[5, 4\], expected \[\*, 3\]"):
        ops.logits(torch.ones(2, 3), torch.ones(5, 4))

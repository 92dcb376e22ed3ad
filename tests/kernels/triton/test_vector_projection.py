"""Projections of a single token."""

from collections.abc import Callable

import pytest
import torch

from kernels.providers import load_ops
from kernels.triton.vector_projection import project_vector
from tests.kernels.triton.conftest import HAS_GPU
from tests.support.models.numerics import assert_close

SHAPES = [(70, 96), (4, 4096), (9, 4112), (6, 6144)]
"""(outputs, inputs): partial blocks of outputs and inputs, and inputs in a block or several."""
MAX_RELATIVE_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(
    params=[torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=str,
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    wanted: torch.dtype = request.param
    return wanted


def inputs(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weight, bias."""
    torch.manual_seed(0)
    outputs, width = shape
    sizes = ((1, width), (outputs, width), (outputs,))
    hidden, weight, bias = (torch.randn(size, device=device).to(dtype) for size in sizes)
    if HAS_GPU:
        # A weight is read before the kernels that still run end.
        torch.cuda.synchronize()
    return hidden, weight, bias


@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> None:
    hidden, weight, bias = inputs(shape, device, dtype)
    theirs = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double())
    ours = project_vector(hidden, weight, bias, dtype)
    assert ours.dtype == dtype
    assert_close(ours, theirs, MAX_RELATIVE_ERROR[dtype])
    exact = project_vector(hidden, weight, None, torch.float32)
    assert exact.dtype == torch.float32
    assert_close(exact, theirs - bias, 1e-5)


@pytest.mark.gpu
def test_each_kernel_of_a_graph_waits_for_what_it_reads(device: torch.device) -> None:
    ops = load_ops("triton")
    layers = [inputs((2048, 1024), device, torch.bfloat16)[1] / 32 for _ in range(16)]
    norm = torch.ones(1024, dtype=torch.bfloat16, device=device)
    start = torch.randn(1, 1024, device=device).to(torch.bfloat16)

    def step(settle: Callable[[], None]) -> torch.Tensor:
        hidden, residual = start.clone(), start.clone()
        settle()
        for weight in layers:
            hidden, residual = ops.add_rms_norm(hidden, residual, norm, 1e-5)
            settle()
            hidden = ops.projection(hidden, weight, None)
            settle()
            hidden = ops.silu_mul(hidden)
            settle()
        return hidden

    expected = step(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(lambda: None)
    for _ in range(100):
        graph.replay()
        assert torch.equal(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_a_single_token_takes_this_kernel(device: torch.device, bias: bool) -> None:
    hidden, weight, added = inputs((64, 4096), device, torch.float32)
    ops, chosen = load_ops("triton"), added if bias else None
    own = project_vector(hidden, weight, chosen, torch.float32)
    assert torch.equal(ops.projection(hidden, weight, chosen), own)
    assert not torch.equal(torch.nn.functional.linear(hidden, weight, chosen), own)
    if not bias:
        assert torch.equal(ops.logits(hidden, weight), own)


def test_shapes_that_differ_are_refused(device: torch.device) -> None:
    hidden, weight, bias = inputs((70, 96), device, torch.float32)
    with pytest.raises(ValueError, match="weight has shape"):
        project_vector(hidden[:, 1:], weight, bias, torch.float32)
    with pytest.raises(ValueError, match="bias has shape"):
        project_vector(hidden, weight, bias[1:], torch.float32)
    with pytest.raises(ValueError, match="hidden has shape"):
        project_vector(hidden.expand(2, -1), weight, bias, torch.float32)

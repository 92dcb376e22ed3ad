"""The operations of a mixture of experts, of every provider, against each row's product in
float64."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.block_planes import block_planes
from kernels.planes import Planes
from kernels.providers import Ops, load_ops
from kernels.quantized import BLOCKS, QuantizedWeight, dequantize
from tests.kernels.blocks import random_blocks
from tests.support.models.numerics import assert_close

NUM_EXPERTS, TOP_K, INPUTS, OUTPUTS = 5, 2, 35, 70
EMPTY = 3
"""The expert that no token has chosen."""
MAX_RELATIVE_ERROR = 2e-6


@dataclass(frozen=True)
class Case:
    chosen: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor

    def product(self, ops: Ops) -> Tensor:
        """[num_tokens, TOP_K, OUTPUTS]."""
        order, starts = ops.group_rows(self.chosen, NUM_EXPERTS)
        out = ops.grouped_projection(
            self.hidden, self.weight, self.bias, order, starts, num_shared=TOP_K
        )
        return out.view(*self.chosen.shape, -1)

    def expected(self) -> Tensor:
        weight, bias = self.weight.double()[self.chosen], self.bias.double()[self.chosen]
        return torch.einsum("ti,tkoi->tko", self.hidden.double(), weight) + bias


def case(num_tokens: int) -> Case:
    torch.manual_seed(0)
    others = torch.tensor([expert for expert in range(NUM_EXPERTS) if expert != EMPTY])
    ranks = torch.rand(num_tokens, len(others)).argsort(dim=1)[:, :TOP_K]
    return Case(
        others[ranks],
        torch.randn(num_tokens, INPUTS),
        torch.randn(NUM_EXPERTS, OUTPUTS, INPUTS),
        torch.randn(NUM_EXPERTS, OUTPUTS),
    )


def test_rows_are_grouped_by_expert_in_their_order(provided_ops: Ops) -> None:
    chosen = torch.randint(NUM_EXPERTS, (700, 3))
    chosen[chosen == EMPTY] = 0

    order, starts = provided_ops.group_rows(chosen, NUM_EXPERTS)

    for expert in range(NUM_EXPERTS):
        own = order[starts[expert] : starts[expert + 1]].tolist()
        assert own == torch.nonzero(chosen.flatten() == expert).flatten().tolist()
    assert starts[-1] == chosen.numel()


@pytest.mark.parametrize("num_tokens", [1, 13, 90])
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(
    provided_ops: Ops, num_tokens: int
) -> None:
    given = case(num_tokens)
    assert_close(given.product(provided_ops), given.expected(), MAX_RELATIVE_ERROR)


@pytest.mark.parametrize("provided_ops", ["triton"], indirect=True)
def test_a_row_has_the_same_bits_alone_and_among_others(provided_ops: Ops) -> None:
    """``provided_ops`` only choose the device of the tensors."""
    ops, given = load_ops("triton", is_batch_invariant=True), case(90)
    together = given.product(ops)
    for token in (0, 89):
        own = slice(token, token + 1)
        alone = replace(given, chosen=given.chosen[own], hidden=given.hidden[own])
        # The interpreter's products come from a library that sums a tile's rows by their place.
        bound = 0 if torch.cuda.is_available() else MAX_RELATIVE_ERROR
        assert_close(alone.product(ops)[0], together[token], bound)


def packed_case(name: str, num_tokens: int) -> tuple[Case, Planes]:
    """The matrices of ``weight`` in planes."""
    with torch.device("cpu"):
        stored = random_blocks(name, NUM_EXPERTS * OUTPUTS, BLOCKS[name].inputs * 3)
    given = case(num_tokens)
    stored = QuantizedWeight(name, stored.blocks.to(given.hidden.device))
    weight = dequantize(stored).view(NUM_EXPERTS, OUTPUTS, -1)
    hidden = torch.randn(num_tokens, weight.shape[2])
    return replace(given, hidden=hidden, weight=weight), block_planes(stored)


def packed_product(ops: Ops, given: Case, planes: Planes) -> Tensor:
    order, starts = ops.group_rows(given.chosen, NUM_EXPERTS)
    out = ops.grouped_plane_linear(
        given.hidden, planes, given.bias, order, starts, num_shared=TOP_K
    )
    return out.view(*given.chosen.shape, -1)


@pytest.mark.parametrize(("name", "num_tokens"), [("mxfp4", 1), ("q4_k", 13), ("q5_0", 40)])
def test_each_row_is_multiplied_by_the_packed_matrix_of_its_expert(
    provided_ops: Ops, name: str, num_tokens: int
) -> None:
    given, planes = packed_case(name, num_tokens)
    actual = packed_product(provided_ops, given, planes)
    assert_close(actual, given.expected(), MAX_RELATIVE_ERROR)


@pytest.mark.parametrize("provided_ops", ["triton"], indirect=True)
def test_the_tiles_of_packed_experts_may_depend_on_the_rows_or_not(provided_ops: Ops) -> None:
    given, planes = packed_case("mxfp4", 50)
    given = replace(given, hidden=given.hidden.half(), bias=given.bias.half())
    for ops in (provided_ops, load_ops("triton", is_batch_invariant=True)):
        actual = packed_product(ops, given, planes)
        assert_close(actual, given.expected(), 2e-3)


def test_experts_are_added_in_the_order_of_the_choice(provided_ops: Ops) -> None:
    torch.manual_seed(0)
    outputs, shares = torch.randn(3 * 4, 17).half(), torch.rand(3, 4)
    weighed = (outputs.view(3, 4, 17) * shares.unsqueeze(2)).half().float()
    total = torch.zeros(3, 17)
    for k in range(4):
        total = total + weighed[:, k]
    assert torch.equal(provided_ops.sum_experts(outputs, shares), total.half())


def test_shapes_that_do_not_fit_are_refused_with_both(provided_ops: Ops) -> None:
    given = case(4)
    with pytest.raises(ValueError, match=r"weight has shape \[5, 70, 34\], expected \[\*, \*, 35"):
        replace(given, weight=given.weight[:, :, 1:]).product(provided_ops)
    with pytest.raises(ValueError, match=r"bias has shape \[5, 69\], expected \[5, 70\]"):
        replace(given, bias=given.bias[:, 1:]).product(provided_ops)
    packed, planes = packed_case("mxfp4", 4)
    order, starts = provided_ops.group_rows(given.chosen % 4, 4)
    with pytest.raises(ValueError, match=r"350 outputs of 4 experts"):
        provided_ops.grouped_plane_linear(
            packed.hidden, planes, None, order, starts, num_shared=TOP_K
        )
    with pytest.raises(ValueError, match=r"outputs has shape \[7, 2\], expected \[6, \*\]"):
        provided_ops.sum_experts(torch.ones(7, 2), torch.ones(3, 2))

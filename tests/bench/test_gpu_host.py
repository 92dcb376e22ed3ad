"""The host's part of a step, measured without a GPU."""

import pytest
import torch

from bench.gpu.host import HostSteps, idle_ops
from bench.gpu.steps import DRAWN, GREEDY
from shared.messages import SamplingParams


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_every_sequence_gets_a_token_in_every_step(sampling: SamplingParams) -> None:
    steps = HostSteps(5, sampling)
    assert steps.run(4) == 20
    assert steps.step_ms(2) > 0
    steps.close()


def test_operations_that_compute_nothing_draw_token_0() -> None:
    ops, logits = idle_ops(), torch.randn(3, 7)
    assert ops.most_likely(logits).tolist() == [0, 0, 0]
    ones = torch.ones(3)
    assert ops.draw_rows(logits, ones, ones, ones).tolist() == [0, 0, 0]

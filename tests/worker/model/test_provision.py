"""Which provider computes a model, given the options and the model's needs."""

import pytest
import torch

from shared.errors import StartupError
from worker.model.provision import can_be_native, foreign_ops, provider_on

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "kernels", "provider"),
    [
        (CPU, "auto", "reference"),
        (CPU, "native", "reference"),
        (CUDA, "auto", "triton"),
        (CUDA, "triton", "triton"),
        (CUDA, "reference", "reference"),
    ],
)
def test_a_gpu_has_triton_unless_something_else_is_wanted(
    device: torch.device, kernels: str, provider: str
) -> None:
    assert provider_on(device, kernels) == provider


def test_triton_is_refused_on_the_cpu() -> None:
    with pytest.raises(StartupError, match="Triton kernels run on a GPU"):
        provider_on(CPU, "triton")


def test_native_kernels_are_taken_where_they_can_and_refused_where_they_must() -> None:
    assert can_be_native("auto", lambda: None)
    assert can_be_native("native", lambda: None)
    assert not can_be_native("auto", lambda: "too odd")
    with pytest.raises(StartupError, match="too odd"):
        can_be_native("native", lambda: "too odd")


def test_nobody_asks_the_native_library_where_it_is_not_wanted() -> None:
    def asked() -> str | None:
        raise AssertionError

    assert not can_be_native("reference", asked)


@pytest.mark.parametrize(
    ("kernels", "dtype", "head_dim", "block_size", "expected"),
    [
        ("auto", torch.float32, 64, 16, "native"),
        ("reference", torch.float32, 64, 16, "reference"),
        ("auto", torch.float32, 80, 48, "reference"),
        ("auto", torch.float32, 72, 16, "reference"),
        ("auto", torch.float16, 64, 16, "reference"),
    ],
)
def test_foreign_models_get_the_native_attention_where_it_can(
    kernels: str, dtype: torch.dtype, head_dim: int, block_size: int, expected: str
) -> None:
    ops = foreign_ops(kernels, CPU, dtype, head_dims=[head_dim], block_size=block_size)

    assert ops.provider == expected


def test_foreign_models_that_cannot_have_the_native_attention_are_refused() -> None:
    with pytest.raises(StartupError, match="blocks of 48"):
        foreign_ops("native", CPU, torch.float32, head_dims=[64], block_size=48)
    with pytest.raises(StartupError, match="run on the CPU, not on cuda"):
        foreign_ops("native", CUDA, torch.float32, head_dims=[64], block_size=16)

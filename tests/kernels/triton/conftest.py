"""The device of the kernels: a GPU, or else Triton's interpreter."""

import pytest
import torch

from kernels.providers import Ops, load_ops

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def triton_ops() -> Ops:
    return load_ops("triton")

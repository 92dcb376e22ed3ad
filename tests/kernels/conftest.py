"""Every provider passes the same tests."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.native.library import Library, library
from kernels.native.paged_attention import attend
from kernels.providers import Ops, Provider, load_ops
from tests.kernels.interpreter import quick_interpreter
from tests.support.models.native import variants

__all__ = ["quick_interpreter"]


@pytest.fixture(scope="session")
def wide() -> Library:
    return variants()["avx512 in halves, bfloat16 products"]


@pytest.fixture(scope="session", params=["own", "wide"])
def native(request: pytest.FixtureRequest) -> Library:
    """This processor's library, and the library for wider vectors."""
    wide: Library = request.getfixturevalue("wide") if request.param == "wide" else library()
    return wide


@pytest.fixture(params=["reference", "native", "native, wide"], scope="session")
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return load_ops("reference")
    ops = load_ops("native")
    if request.param == "native":
        return ops
    wide = request.getfixturevalue("wide")

    def paged_attention(*tensors: Tensor, spec: AttentionSpec, **_: Any) -> Tensor:
        return attend(wide, *tensors, spec=spec)

    return ops.replace(paged_attention=paged_attention)


@pytest.fixture(params=get_args(Provider))
def provided_ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """The ops of each provider; tensors are created on their device."""
    is_on_gpu = request.param == "triton" and torch.cuda.is_available()
    with torch.device("cuda" if is_on_gpu else "cpu"):
        yield load_ops(request.param)

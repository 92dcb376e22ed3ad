"""Every provider passes the same tests."""

import pytest

from kernels.providers import Ops, load_ops


@pytest.fixture(params=["reference"], scope="session")
def ops(request: pytest.FixtureRequest) -> Ops:
    return load_ops(request.param)

"""The package's name, and the interface of a provider."""

import inspect
from typing import get_args

import pytest
from transformers.utils.import_utils import is_kernels_available

import kernels
from kernels.providers import OPERATIONS, Ops, Provider, load_ops


def test_transformers_does_not_take_our_package_for_the_one_it_probes_for() -> None:
    assert kernels.__version__ == "0.0.0"
    assert not is_kernels_available()


@pytest.mark.parametrize("provider", get_args(Provider))
def test_every_op_has_the_parameters_that_models_pass(provider: Provider) -> None:
    ops = load_ops(provider)
    assert ops.provider == provider
    for name in OPERATIONS:
        declared = inspect.signature(getattr(Ops, name)).parameters
        provided = inspect.signature(getattr(ops, name)).parameters
        # `load_ops` chooses between two ways to compute the same.
        choices = [choice for choice in provided if choice != "is_batch_invariant"]
        assert list(declared) == choices, name

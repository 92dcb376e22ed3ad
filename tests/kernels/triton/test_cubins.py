"""Every kernel that is launched compiles for every supported GPU, and fits its registers."""

import importlib
import pkgutil
from types import ModuleType, SimpleNamespace

import pytest
from triton.runtime.jit import serialize_specialization_data

import kernels.triton
from tests.kernels.triton.cubins import (
    Cubin,
    compile_all,
    every_specialization,
    one_of_each_kernel,
)

MAX_SHARED_BYTES = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes per thread block (CUDA programming guide, compute capabilities). 8.0 has 163 KiB, but code
for it also runs on 8.6, 8.9 and 12.0, which have 99."""
MAX_STACK_BYTES = 16
"""Per thread. Triton 3.6 puts one or two values of the attention kernels on the stack."""
MODULES = [f"kernels.triton.{part.name}" for part in pkgutil.iter_modules(kernels.triton.__path__)]
FAULTY = "tests.kernels.triton.spilling"


MAX_MEASURED_STACK_BYTES = 288
"""Of the tiles that are the fastest nevertheless, see `kernels.triton.attention_tiles`."""


def max_stack_bytes(cubin: Cubin) -> int:
    is_measured = all(
        part in cubin.name for part in ("attention_kernel", "'HEAD_DIM': 128", "'BLOCK_M': 128")
    )
    is_measured &= cubin.target == 90
    return MAX_MEASURED_STACK_BYTES if is_measured else MAX_STACK_BYTES


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(one_of_each_kernel, id="one of each kernel"),
        pytest.param(every_specialization, id="all", marks=pytest.mark.cubins),
    ],
)
def cubins(request: pytest.FixtureRequest) -> list[Cubin]:
    return compile_all([*request.param(*MODULES), *every_specialization(FAULTY)])


@pytest.mark.timeout(1200)
def test_what_spills_is_the_planted_fault_alone(cubins: list[Cubin]) -> None:
    spilling = [cubin for cubin in cubins if cubin.spilled_bytes > max_stack_bytes(cubin)]
    assert [(cubin.module, cubin.name) for cubin in spilling] == [
        (FAULTY, "centre_kernel {'PADDED_SIZE': 8192} *fp32:16 *fp32:16 i32")
    ]


@pytest.mark.timeout(1200)
def test_every_target_has_the_shared_memory(cubins: list[Cubin]) -> None:
    assert {cubin.target for cubin in cubins} == set(MAX_SHARED_BYTES)
    assert [c for c in cubins if c.shared_bytes > MAX_SHARED_BYTES[c.target]] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_kernel_is_compiled(name: str) -> None:
    module = importlib.import_module(name)
    compiled = {c.kernel.__name__ for c in getattr(module, "CONFIGURATIONS", ())}
    assert kernel_names(module) == compiled


@pytest.mark.parametrize("name", MODULES)
def test_the_compilation_of_every_kernel_can_be_observed(name: str) -> None:
    """Triton writes a kernel's constants as JSON for an observer of compilations."""
    module = importlib.import_module(name)
    without = SimpleNamespace()
    for one in getattr(module, "CONFIGURATIONS", ()):
        plain = [value for value in one.constexprs.values() if not hasattr(value, "fn")]
        constants = {(place,): value for place, value in enumerate(plain)}
        written = serialize_specialization_data(name, {}, constants, {}, without, "", without)
        assert name in written


def kernel_names(module: ModuleType) -> set[str]:
    """The functions of the module that are launched, as opposed to called by others."""
    jitted = [value.fn for value in vars(module).values() if hasattr(value, "fn")]
    own = {function.__name__ for function in jitted if function.__module__ == module.__name__}
    return {name for name in own if name.endswith("_kernel")}

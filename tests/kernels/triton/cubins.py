"""Compiles Triton kernels for GPUs that need not be present, and reads their resource usage.

``python -m tests.kernels.triton.cubins`` reads a JSON list of `Specialization` and prints a list
with the `Cubin` of each. It runs in a process of its own, because TRITON_INTERPRET, which the other
tests need, replaces the compiler.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton.configurations import Configuration

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")


class Specialization(NamedTuple):
    """A configuration of a kernel, to be compiled for a target."""

    module: str
    place: int
    """In the module's CONFIGURATIONS."""
    target: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """The resources that a compiled kernel takes of a multiprocessor."""

    module: str
    name: str
    target: int
    registers: int
    """Per thread; 255 at most."""
    spilled_bytes: int
    """Per thread: values that found no register and are kept in memory instead."""
    shared_bytes: int
    """Per thread block."""


def every_specialization(*modules: str) -> list[Specialization]:
    """Everything that the modules launch, for every target."""
    return [
        Specialization(module, place, target)
        for module in modules
        for place, configuration in enumerate(_configurations(module))
        for target in configuration.targets
    ]


def one_of_each_kernel(*modules: str) -> list[Specialization]:
    """The first configuration of each kernel for one of its targets. Consecutive kernels have
    different targets if they can."""
    places: dict[tuple[str, str], int] = {}
    for module in modules:
        for place, configuration in enumerate(_configurations(module)):
            places.setdefault((module, configuration.kernel.__name__), place)
    chosen = []
    for number, ((module, _), place) in enumerate(places.items()):
        targets = _configurations(module)[place].targets
        chosen.append(Specialization(module, place, targets[number % len(targets)]))
    return chosen


def compile_all(specializations: Sequence[Specialization]) -> list[Cubin]:
    """Compile the specializations, in another process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.cubins"],
        env=environment,
        input=json.dumps(specializations),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Cubin(**fields) for fields in json.loads(done.stdout)]


def main() -> None:
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        cubins = pool.map(_compile, *zip(*json.load(sys.stdin), strict=True))
        print(json.dumps([asdict(cubin) for cubin in cubins]))


def _configurations(module: str) -> Sequence[Configuration]:
    return getattr(importlib.import_module(module), "CONFIGURATIONS", ())


def _compile(module: str, place: int, target: int) -> Cubin:
    chosen = _configurations(module)[place]
    kernel = chosen.kernel
    types = dict(chosen.signature) | dict.fromkeys(chosen.constexprs, "constexpr")
    assert set(types) == set(kernel.arg_names), (kernel.arg_names, sorted(types))
    varying = {name for name, kind in chosen.signature.items() if kind == "i32"}
    assert varying <= set(kernel.do_not_specialize), (kernel.__name__, sorted(varying))
    source = ASTSource(
        kernel,
        {name: types[name].removesuffix(":16") for name in kernel.arg_names},
        dict(chosen.constexprs),
        dict(_multiples_of_16(kernel.arg_names, types)),
    )
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    compiled = triton.compile(source, GPUTarget("cuda", target, 32), options)
    registers, spilled = _usage(compiled.asm["cubin"])
    name = f"{kernel.__name__} {chosen.constexprs} {' '.join(chosen.signature.values())}"
    return Cubin(module, name, target, registers, spilled, compiled.metadata.shared)


def _multiples_of_16(names: list[str], types: dict[str, str]) -> Iterator[tuple[Any, Any]]:
    for place, name in enumerate(names):
        if types[name].endswith(":16"):
            yield (place,), [["tt.divisibility", 16]]


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(printed)
    assert found, printed
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


if __name__ == "__main__":
    main()

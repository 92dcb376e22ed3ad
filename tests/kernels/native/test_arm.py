"""ARM64 computes the same bits as x86-64: a program with every operation, compiled for both."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.native.build import VARIANTS
from kernels.native.packed import FORMATS as NUMBERS
from tests.kernels.native.test_linear import FORMATS, matrix

SOURCE = Path(__file__).with_name("same_bits.cpp")
FLAGS = ("-std=c++20", "-ffp-contract=off", "-pthread", "-Wno-psabi", "-Ikernels/native/src")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SIMDE = Path("/usr/include/simde")
ROOT = Path(__file__).parents[3]
OUTPUTS, INPUTS = 37, 512


def write_matrices(path: Path) -> None:
    with path.open("wb") as file:
        for name in FORMATS:
            rows = matrix(name, OUTPUTS, INPUTS).data.contiguous().view(torch.uint8)
            rows = rows.reshape(OUTPUTS, -1)
            header = [NUMBERS[name], OUTPUTS, INPUTS, rows.shape[1]]
            file.write(np.array(header, dtype=np.int32).tobytes() + rows.numpy().tobytes())


def compiled(compiler: str, program: Path, *options: str) -> str:
    command = [compiler, *FLAGS, *options, "-o", str(program), str(SOURCE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return str(program)


@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR) and SIMDE.exists()),
    reason="needs g++-aarch64-linux-gnu, qemu-user-static and libsimde-dev",
)
def test_every_operation_has_the_same_bits(tmp_path: Path) -> None:
    write_matrices(tmp_path / "matrices")
    # Headers of /usr/include itself come last, because others there are for this processor.
    neon = (*VARIANTS["neon"].options, "-O1", "-static", "-idirafter", str(SIMDE.parent))
    with ThreadPoolExecutor() as threads:
        here = threads.submit(compiled, "g++", tmp_path / "here", *VARIANTS["avx2"].options, "-O0")
        there = threads.submit(compiled, COMPILER, tmp_path / "there", *neon)
    commands = ([here.result()], [EMULATOR, there.result()])

    own, arm = (
        subprocess.run(
            [*command, str(tmp_path / "matrices")], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for command in commands
    )

    assert len(own) > len(FORMATS)
    assert arm == own

"""The stages of a team, with threads that are late, under the thread sanitizer."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("stages.cpp")
FLAGS = ("-std=c++20", "-O1", "-fsanitize=thread", "-march=x86-64-v3", "-pthread")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("stages") / "stages"
    command = ["g++", *FLAGS, f"-I{ROOT / 'kernels/native/src'}", "-o", str(program), str(SOURCE)]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_every_task_runs_once_and_after_the_stage_before(program: Path, num_threads: int) -> None:
    # The sanitizer expects parts of the address space to be free.
    command = ["setarch", "--addr-no-randomize", str(program), str(num_threads), "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr

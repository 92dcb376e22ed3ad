"""The machine and the versions with which figures were measured."""

import datetime
import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from bench.systems import System

_ROOT = Path(__file__).parents[1]
_INSTRUCTION_SETS = re.compile(r"avx\w*|amx\w*|f16c|fma")
_PACKAGES = ("warren", "torch", "numpy", "aio-pika", "uvicorn", "uvloop")


def describe(systems: Iterable[System]) -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat the figures, for a JSON file."""
    cpu = _cpu_info()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": [Path(sys.argv[0]).stem, *map(_without_folders, sys.argv[1:])],
        "machine": {
            "cpu": cpu.get("model name", platform.processor()),
            "cores": psutil.cpu_count(),
            "instruction_sets": sorted(set(_INSTRUCTION_SETS.findall(cpu.get("flags", "")))),
            "memory_bytes": psutil.virtual_memory().total,
            "system": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
            **{one.name: _output(one.program, "--version") for one in systems if one.program},
        },
    }


def _commit() -> str:
    """The last commit, and whether files other than results differ from it."""
    git = ("git", "-C", str(_ROOT))
    commit = _output(*git, "rev-parse", "--short=12", "HEAD")
    changed = _output(
        *git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results"
    )
    return f"{commit}-dirty" if changed else commit


def _without_folders(argument: str) -> str:
    """Remove directories: they mean nothing on another machine."""
    return re.sub(r"(^|=)/\S*/", r"\1", argument)


def _cpu_info() -> dict[str, str]:
    """The facts that the kernel reports about the first core."""
    first, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _output(*command: str) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout.strip()

"""The available clients, their requirements, and how to start their programs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent
ROOT = _HERE.parents[1]
_VERSION = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
_TORCH = "torch==2.13.0"
"""Installed before packages that require any version of torch and would install the newest one."""


class Missing(Exception):
    """A requirement of a client that the machine lacks."""


class Program(NamedTuple):
    """A client that can be started."""

    version: str
    command: list[str]
    """Called with the fields of `checks.Target`."""
    directory: Path


def _python(module: str, requirements: tuple[str, ...], directory: Path) -> Program:
    """A module, and the distributions to install for it, the client last."""
    python, stamp = directory / "bin" / "python", directory / ".installed"
    if not stamp.exists():
        _run(sys.executable, "-m", "venv", "--clear", directory)
        for requirement in requirements:
            _run(python, "-m", "pip", "install", "--quiet", requirement)
        stamp.touch()
    return _module(python, module, requirements[-1].partition("[")[0])


def _node(program: str, package: str, directory: Path) -> Program:
    """A program of this folder, and the package that it imports."""
    node, npm = _command("node"), _command("npm")
    manifest = directory / "node_modules" / package / "package.json"
    if not manifest.exists():
        directory.mkdir(parents=True, exist_ok=True)
        _run(npm, "install", "--no-fund", "--no-audit", "--prefix", directory, package)
    version = json.loads(manifest.read_text())["version"]
    return Program(version, [node, str(_HERE / program)], directory)


def _vllm(directory: Path) -> Program:
    return _module(Path(_command("vllm")).parent / "python", "tests.clients.vllm_client", "vllm")


def _chromium(directory: Path) -> Program:
    version = _run(_command("chromium"), "--version").split()[1]
    return Program(version, [sys.executable, "-m", "tests.clients.browser_client"], ROOT)


CLIENTS: Mapping[str, Callable[[Path], Program]] = {
    "openai": partial(_python, "tests.clients.openai_client", ("openai",)),
    "openai-node": partial(_node, "node_client.mjs", "openai"),
    "anthropic": partial(_python, "tests.clients.anthropic_client", ("anthropic",)),
    "anthropic-node": partial(_node, "anthropic_node_client.mjs", "@anthropic-ai/sdk"),
    "langchain": partial(_python, "tests.clients.langchain_client", ("langchain-openai",)),
    "litellm": partial(_python, "tests.clients.litellm_client", ("litellm",)),
    "instructor": partial(_python, "tests.clients.instructor_client", ("instructor",)),
    "lm-eval": partial(_python, "tests.clients.lm_eval_client", (_TORCH, "lm-eval[api,hf]")),
    "guidellm": partial(_python, "tests.clients.guidellm_client", (_TORCH, "guidellm")),
    "vllm-bench": _vllm,
    "chromium": _chromium,
}
"""Each one installs itself into a directory unless it is installed there. Raises `Missing`."""


def _module(python: Path, module: str, distribution: str) -> Program:
    version = _run(python, "-c", _VERSION, distribution).strip()
    return Program(version, [str(python), "-m", module], ROOT)


def _command(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Missing(f"there is no {name} in PATH")
    return found


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
    return done.stdout

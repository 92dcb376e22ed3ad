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
"""Installed before packages that require any version of torch, because they would install the
newest version."""


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


def _node(program: str, packages: tuple[str, ...], directory: Path) -> Program:
    """A program of this folder, and the packages that it imports, the client last."""
    return Program(_npm(packages, directory), [_command("node"), str(_HERE / program)], directory)


def _node_command(module: str, package: str, directory: Path) -> Program:
    """A module that calls the command of a package, which is below its working directory."""
    return Program(_npm((package,), directory), [sys.executable, "-m", module], directory)


def _vllm(directory: Path) -> Program:
    return _module(Path(_command("vllm")).parent / "python", "tests.clients.vllm_client", "vllm")


def _chromium(directory: Path) -> Program:
    version = _run(_command("chromium"), "--version").split()[1]
    return Program(version, [sys.executable, "-m", "tests.clients.browser_client"], ROOT)


def _client(name: str, *requirements: str) -> Callable[[Path], Program]:
    return partial(_python, f"tests.clients.{name}_client", requirements)


CLIENTS: Mapping[str, Callable[[Path], Program]] = {
    "openai": _client("openai", "openai"),
    "openai-node": partial(_node, "node_client.mjs", ("openai",)),
    "anthropic": _client("anthropic", "anthropic"),
    "anthropic-node": partial(_node, "anthropic_node_client.mjs", ("@anthropic-ai/sdk",)),
    "langchain": _client("langchain", "langchain-openai"),
    "llama-index": _client("llama_index", "llama-index-llms-openai-like"),
    "litellm": _client("litellm", "litellm"),
    "instructor": _client("instructor", "instructor"),
    "pydantic-ai": _client("pydantic_ai", "pydantic-ai-slim[openai]"),
    "openai-agents": _client("openai_agents", "openai-agents"),
    "dspy": _client("dspy", "dspy"),
    "llm": _client("llm", "llm"),
    "guidance": _client("guidance", "openai", "guidance"),
    "outlines": _client("outlines", "outlines[openai]"),
    "haystack": _client("haystack", "haystack-ai"),
    "smolagents": _client("smolagents", "smolagents[openai]"),
    "autogen": _client("autogen", "autogen-agentchat", "autogen-ext[openai]"),
    "crewai": _client("crewai", "crewai"),
    "ai-sdk": partial(_node, "ai_sdk_client.mjs", ("zod", "@ai-sdk/openai-compatible", "ai")),
    "claude-code": partial(
        _node_command, "tests.clients.claude_code_client", "@anthropic-ai/claude-code"
    ),
    "codex": partial(_node_command, "tests.clients.codex_client", "@openai/codex"),
    "lm-eval": _client("lm_eval", _TORCH, "lm-eval[api,hf]"),
    "guidellm": _client("guidellm", _TORCH, "guidellm"),
    "vllm-bench": _vllm,
    "chromium": _chromium,
}
"""Each program installs itself into a directory unless it is installed there. Raises `Missing`."""


def _npm(packages: tuple[str, ...], directory: Path) -> str:
    """Returns the version of the last package."""
    npm, manifest = _command("npm"), directory / "node_modules" / packages[-1] / "package.json"
    if not manifest.exists():
        directory.mkdir(parents=True, exist_ok=True)
        _run(npm, "install", "--no-fund", "--no-audit", "--prefix", directory, *packages)
    return str(json.loads(manifest.read_text())["version"])


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
        raise Missing(f"{Path(command[0]).name} failed: {done.stderr.strip()[-300:]}")
    return done.stdout

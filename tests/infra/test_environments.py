"""Each side runs with its own extra alone: the gateway has no torch, the worker no web
framework."""

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "accelerate"}
WEB = {"fastapi", "starlette", "uvicorn", "openai"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(extra: str) -> dict[str, Distribution]:
    """The distributions of ``pip install .[extra]``, by name, in this environment's versions."""
    found: dict[str, Distribution] = {}
    seen: set[str] = set()
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    while wanted:
        line = wanted.pop()
        if line not in seen:
            seen.add(line)
            requirement = Requirement(line)
            if is_wanted(requirement):
                name = normalized(requirement.name)
                found[name] = distribution(name)
                wanted += requirements(found[name], requirement.extras or {""})
    return found


def is_wanted(requirement: Requirement, extras: Iterable[str] = ("",)) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


def requirements(installed: Distribution, extras: Iterable[str]) -> list[str]:
    """The requirements of a distribution with these extras, without the conditions."""
    needed = [Requirement(line) for line in installed.requires or []]
    return [
        str(requirement).partition(";")[0]
        for requirement in needed
        if is_wanted(requirement, extras)
    ]


def environment(extra: str, directory: Path) -> Path:
    """A virtual environment with only these distributions, linked from this environment; returns
    its Python."""
    venv.create(directory, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    for installed in closure(extra).values():
        tops = {file.parts[0] for file in installed.files or [] if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(installed.locate_file(top))))
    return directory / "bin" / "python"


def run(python: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *args],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
    )


@pytest.mark.parametrize(
    ("extra", "absent", "module"),
    [("gateway", HEAVY, "gateway.app"), ("worker", WEB, "worker.process.service")],
)
def test_each_side_runs_without_the_other(
    extra: str, absent: set[str], module: str, tmp_path: Path
) -> None:
    assert not absent & set(closure(extra))
    python = environment(extra, tmp_path)

    imported = run(python, "-c", f"import {module}, shared.bus.rabbit")
    shown = run(python, "warren.py", extra, "--help")

    assert imported.returncode == 0, imported.stderr
    assert shown.returncode == 0, shown.stderr


def test_the_other_side_is_named_when_it_is_not_installed(tmp_path: Path) -> None:
    python = environment("worker", tmp_path)

    refused = run(python, "warren.py", "gateway", "--broker=amqp://127.0.0.1:1")

    assert refused.returncode == 2
    assert re.fullmatch(
        r"error: \w+ is not installed: run pip install '\.\[gateway\]' in the checkout of Warren\n",
        refused.stderr,
    ), refused.stderr


def test_all_extras_together_resolve_to_the_pinned_versions() -> None:
    """pip itself confirms that the installed distributions meet every requirement and
    constraint."""
    resolved = run(
        Path(sys.executable),
        *("-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation"),
        *("--disable-pip-version-check", "--constraint=constraints.txt"),
        f".[{','.join(PROJECT['optional-dependencies'])}]",
    )

    assert resolved.returncode == 0, resolved.stderr
    others = re.findall(r"^Would install (?!warren-\S+$)(.*)$", resolved.stdout, re.MULTILINE)
    assert others == []

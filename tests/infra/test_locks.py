"""The images install what constraints.txt names, checked by its hashes."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "infra" / "docker"
EXTRAS = {"gateway": "gateway", "worker-cpu": "worker", "worker-cuda": "worker"}
_CUDA = re.compile(r"nvidia-|cuda-|torch$")


def locked(name: str) -> dict[str, str]:
    """The versions of a lock, each of which has hashes."""
    text = (DOCKER / f"{name}.lock").read_text()
    entries = re.findall(
        r"^(\S+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)", text, re.MULTILINE
    )
    assert len(entries) == text.count("==")
    return {found: version for found, version, _ in entries}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_the_versions_of_the_constraints(name: str) -> None:
    versions = {found: v for found, v in locked(name).items() if not _CUDA.match(found)}

    assert versions == {found: pinned()[found] for found in versions}


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_every_requirement_of_its_image(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = chain(project["dependencies"], project["optional-dependencies"][EXTRAS[name]])
    required = {canonicalize_name(Requirement(line).name) for line in lines}

    assert required - set(locked(name)) == ({"torch"} if name == "worker-cpu" else set())


def test_torch_for_cpus_has_the_version_of_the_constraints() -> None:
    assert locked("torch-cpu") == {"torch": f"{pinned()['torch']}+cpu"}


def test_only_the_lock_for_gpus_has_cuda() -> None:
    with_cuda = [name for name in EXTRAS if any(map(_CUDA.match, locked(name)))]

    assert with_cuda == ["worker-cuda"]


@pytest.mark.parametrize("side", ["gateway", "worker"])
def test_an_image_installs_its_lock(side: str) -> None:
    dockerfile = (DOCKER / f"Dockerfile.{side}").read_text()

    installs = re.findall(r"pip install (.+?)(?=&&|\n[A-Z]|\Z)", dockerfile, re.DOTALL)

    *dependencies, project = installs
    assert all("--require-hashes" in install for install in dependencies)
    assert all("--no-deps" in install for install in installs)
    assert project.split()[-1] == "."

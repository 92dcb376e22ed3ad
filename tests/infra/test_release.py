"""A release is built from a tagged commit, and all its parts have the version of the tag."""

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import helm_python
import pytest
from packaging.version import Version
from setuptools_scm import get_version

from infra.release import ReleaseRefused, release, section_of, tagged_version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEW = "0.7.3"
IDENTITY = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@warren.example",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@warren.example",
    "GIT_CONFIG_GLOBAL": os.devnull,
}
SOURCES = [
    *(".dockerignore", ".gitignore", "LICENSE", "README.md", "constraints.txt", "pyproject.toml"),
    *("warren.py", "cli", "gateway", "infra", "kernels", "shared", "worker"),
]


class Checkout:
    """A repository with files of this tree, and with a changelog of its own."""

    def __init__(self, root: Path, sources: list[str]) -> None:
        self.root = root
        root.mkdir()
        for name in sources:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, root / name)
        (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{NEW}]\n\n- News.\n\n## [0.1.0]\n")
        self.git("init", "--quiet")
        self.commit()

    def git(self, *args: str) -> None:
        environment = {**os.environ, **IDENTITY}
        subprocess.run(["git", *args], cwd=self.root, env=environment, check=True)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=All")


@pytest.fixture
def small(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "small", ["pyproject.toml"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    checkout = Checkout(folder / "checkout", SOURCES)
    checkout.git("tag", f"v{NEW}")
    return release(checkout.root, folder / "dist")


def test_a_release_has_all_its_parts_and_their_checksums(built: Path) -> None:
    sums = dict(line.split("  ")[::-1] for line in (built / "SHA256SUMS").read_text().splitlines())

    assert {path.name for path in built.iterdir()} == {*sums, "SHA256SUMS"}
    assert set(sums) == {
        f"warren-{NEW}-py3-none-any.whl",
        f"warren-{NEW}.tar.gz",
        f"warren-{NEW}.tgz",
        f"warren-images-{NEW}.tar.gz",
        "NOTES.md",
    }
    for name, digest in sums.items():
        assert hashlib.sha256((built / name).read_bytes()).hexdigest() == digest
    assert (built / "NOTES.md").read_text() == "- News.\n"


def test_the_wheel_is_whole(built: Path) -> None:
    with zipfile.ZipFile(built / f"warren-{NEW}-py3-none-any.whl") as wheel:
        names = wheel.namelist()

    packages = PROJECT["tool"]["setuptools"]["packages"]
    wanted = {f"warren/{package.replace('.', '/')}/__init__.py" for package in packages}
    assert wanted - {*names} == set()
    assert "warren/gateway/api/console/index.html" in names


def test_the_chart_installs_the_images_of_its_version(built: Path) -> None:
    with helm_python.Chart.load_archive((built / f"warren-{NEW}.tgz").read_bytes()) as chart:
        metadata = chart.metadata

    assert (metadata["version"], metadata["appVersion"]) == (NEW, NEW)


def test_the_images_are_built_with_the_version(built: Path, tmp_path: Path) -> None:
    with tarfile.open(built / f"warren-images-{NEW}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")

    copied = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}

    assert get_version(root=str(tmp_path)) == NEW
    assert (tmp_path / "infra/docker/Dockerfile.worker").exists()
    assert copied >= {"cli", "gateway", "worker", "shared", "kernels", "warren.py"}
    assert copied.isdisjoint({".git", "tests", "docs"})


def test_changes_that_are_not_committed_are_refused(small: Checkout) -> None:
    small.git("tag", f"v{NEW}")
    (small.root / "new.py").touch()

    with pytest.raises(ReleaseRefused, match=r"not committed:\n\?\? new\.py"):
        tagged_version(small.root)


def test_a_commit_without_a_tag_is_refused(small: Checkout) -> None:
    small.git("tag", "v0.7.2")
    (small.root / "new.py").touch()
    small.commit()

    with pytest.raises(ReleaseRefused, match=r"HEAD is 0\.7\.3\.dev1\+g.* git tag .* v0\.7\.3 "):
        tagged_version(small.root)


@pytest.mark.parametrize(
    "changelog", ["## [Unreleased]\n\n- News.\n", f"## [{NEW}]\n\n## [0.1.0]\n\n- Old.\n"]
)
def test_a_version_of_which_the_changelog_says_nothing_is_refused(changelog: str) -> None:
    with pytest.raises(ReleaseRefused, match=r"says nothing of 0\.7\.3: rename"):
        section_of(changelog, NEW)


def test_a_release_is_not_built_over_another(small: Checkout, tmp_path: Path) -> None:
    small.git("tag", f"v{NEW}")
    (tmp_path / "dist" / NEW).mkdir(parents=True)

    with pytest.raises(ReleaseRefused, match="exists already"):
        release(small.root, tmp_path / "dist")


def test_sources_without_a_tag_are_newer_than_the_last_release(tmp_path: Path) -> None:
    """In the folder of an image's build, and in a repository that has no tag."""
    fallback = PROJECT["tool"]["setuptools_scm"]["fallback_version"]
    last = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    major, minor, patch = Version(last).release

    untagged = get_version(
        root=str(Checkout(tmp_path / "checkout", []).root), fallback_version=fallback
    )

    assert fallback == f"{major}.{minor}.{patch + 1}.dev0"
    assert Version(last) < Version(fallback) < Version(untagged)

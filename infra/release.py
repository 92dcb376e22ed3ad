"""Builds a release: the wheel and the sdist, what the images are built from, and the Helm chart.

``python -m infra.release`` builds the version that the tag of HEAD names, from what is committed.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import helm_python
from build import ProjectBuilder
from packaging.version import Version
from setuptools_scm import get_version

ROOT = Path(__file__).parents[1]
CHART = Path("infra/helm/warren")
IMAGES = "infra/docker"
"""The Dockerfiles, which are no part of the context of a build in a checkout."""


class ReleaseRefused(Exception):
    """The checkout is not that of a release."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of all releases")
    try:
        built = release(ROOT, parser.parse_args().out)
    except ReleaseRefused as error:
        sys.exit(f"error: {error}")
    sys.stdout.write("".join(f"{path}\n" for path in sorted(built.iterdir())))


def release(checkout: Path, out: Path) -> Path:
    """Build the release of a checkout into a new folder of ``out``, named like its version, and
    return the folder. Raises `ReleaseRefused`."""
    version = tagged_version(checkout)
    notes = section_of((checkout / "CHANGELOG.md").read_text(), version)
    if (out / version).exists():
        raise ReleaseRefused(f"{out / version} exists already: remove it to build it again")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        built, clone = Path(scratch, version), Path(scratch, "clone")
        built.mkdir()
        # Files that git ignores in the checkout, such as those of other builds, stay out of it.
        _git(checkout, "clone", "--quiet", "--shared", str(checkout.resolve()), str(clone))
        _build_python(clone, built)
        _build_context(clone, built / f"warren-images-{version}.tar.gz", version)
        helm_python.package(clone / CHART, destination=built, version=version, app_version=version)
        (built / "NOTES.md").write_text(notes)
        (built / "SHA256SUMS").write_text(_checksums(built))
        built.rename(out / version)
    return out / version


def tagged_version(checkout: Path) -> str:
    """The version of the tag of HEAD. Raises `ReleaseRefused`."""
    if changed := _git(checkout, "status", "--porcelain"):
        raise ReleaseRefused(f"the checkout has changes that are not committed:\n{changed}")
    version = get_version(root=str(checkout), fallback_version="0")
    parsed = Version(version)
    if parsed.is_devrelease or parsed.local:
        raise ReleaseRefused(
            f"HEAD is {version}, and no tag names it: "
            f"git tag --annotate v{parsed.base_version} --message 'Warren {parsed.base_version}'"
        )
    return version


def section_of(changelog: str, version: str) -> str:
    """What a changelog says of a version. Raises `ReleaseRefused` if it says nothing."""
    heading = re.escape(f"## [{version}]")
    found = re.search(rf"^{heading}[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ReleaseRefused(
            f"CHANGELOG.md says nothing of {version}: rename its section Unreleased to [{version}]"
        )
    return f"{found[1].strip()}\n"


def _build_python(clone: Path, built: Path) -> None:
    """The wheel is built from the sdist, as pip builds it where no wheel fits."""
    made_at = _git(clone, "log", "-1", "--format=%ct").strip()
    runner = partial(_run_hook, {"SOURCE_DATE_EPOCH": made_at})
    sdist = ProjectBuilder(clone, runner=runner).build("sdist", built)
    with tarfile.open(sdist) as archive, tempfile.TemporaryDirectory() as folder:
        archive.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        ProjectBuilder(source, runner=runner).build("wheel", built)


def _build_context(clone: Path, archive: Path, version: str) -> None:
    """What the images are built from: the files that .dockerignore admits, the Dockerfiles, and
    the version, which they have no git to ask for."""
    lines = (clone / ".dockerignore").read_text().splitlines()
    admitted = [line.removeprefix("!") for line in lines if line.startswith("!")]
    facts = f"Metadata-Version: 2.1\nName: warren\nVersion: {version}\n"
    options = ["--format=tar.gz", f"--output={archive}", f"--add-virtual-file=PKG-INFO:{facts}"]
    _git(clone, "archive", *options, "HEAD", "--", *admitted, IMAGES)


def _run_hook(
    variables: Mapping[str, str],
    command: Sequence[str],
    cwd: str | None = None,
    extra_environ: Mapping[str, str] | None = None,
) -> None:
    """Run a step of a build; its output is shown only if it fails."""
    environment = {**os.environ, **(extra_environ or {}), **variables}
    ended = subprocess.run(  # noqa: S603 (the build backend's own)
        command, cwd=cwd, env=environment, text=True, capture_output=True
    )
    if ended.returncode:
        sys.stderr.write(ended.stdout + ended.stderr)
        ended.check_returncode()


def _checksums(built: Path) -> str:
    """The lines that ``sha256sum --check`` reads."""
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(built.iterdir())
    }
    return "".join(f"{digest}  {name}\n" for name, digest in hashes.items())


def _git(checkout: Path, *args: str) -> str:
    return subprocess.run(  # noqa: S603 (no shell, and every argument is ours)
        ["git", "-C", str(checkout), *args],  # noqa: S607 (git is where PATH says)
        check=True,
        text=True,
        capture_output=True,
    ).stdout


if __name__ == "__main__":
    main()

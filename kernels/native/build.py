"""Compiles the C++ sources for a processor variant, and caches the result."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

_SOURCES = Path(__file__).with_name("src")
BUILT = Path(__file__).with_name("built")
"""The location of precompiled libraries in images without a compiler."""
_FLAGS = (
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"),
    # Variants in the same process would otherwise share the variables of inline functions, whose
    # sizes differ.
    "-fvisibility=hidden",
)
_TIMEOUT_S = 600
_WRITABLE_BY_OTHERS = 0o022

_X86_64 = frozenset({"x86_64", "amd64"})
_ARM64 = frozenset({"aarch64", "arm64"})


class InstructionSet(NamedTuple):
    """The code for some processors."""

    machines: frozenset[str]
    """Names of their architecture."""
    flags: frozenset[str]
    """What /proc/cpuinfo lists of their instructions."""
    options: tuple[str, ...]
    """Of the compiler."""


VARIANTS: Mapping[str, InstructionSet] = MappingProxyType(
    {
        "avx512": InstructionSet(
            _X86_64,
            frozenset(
                {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}
            ),
            ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
        ),
        "avx2": InstructionSet(
            _X86_64, frozenset({"avx2", "fma", "f16c", "bmi2"}), ("-march=x86-64-v3",)
        ),
        "neon": InstructionSet(
            _ARM64,
            frozenset({"asimd", "asimddp", "fphp"}),
            ("-march=armv8.2-a+dotprod+fp16", "-Wno-psabi"),
        ),
    }
)
"""The best variant of an architecture comes first."""
_allowed = list(VARIANTS)


class LibraryUnavailable(Exception):
    """This machine cannot compile or run the library; the message gives the reason."""


def limit_variants(best: str) -> None:
    """Do not use variants that are better than ``best`` of the same architecture. Has no effect on
    a loaded library."""
    names = list(VARIANTS)
    better = names[: names.index(best)]
    _allowed[:] = [
        name
        for name in names
        if name not in better or VARIANTS[name].machines != VARIANTS[best].machines
    ]


def best_variant() -> str:
    """The first allowed variant that this processor supports. Raises `LibraryUnavailable`."""
    own = variants_here()
    flags = cpu_flags()
    for name in own:
        if name in _allowed and VARIANTS[name].flags <= flags:
            return name
    required = VARIANTS[own[-1]].flags
    raise LibraryUnavailable(f"the processor has no {', '.join(sorted(required - flags))}")


def variants_here() -> list[str]:
    """The variants for processors of this machine's architecture. Raises `LibraryUnavailable` if
    there are none."""
    machine = platform.machine()
    names = [name for name, one in VARIANTS.items() if machine.lower() in one.machines]
    if not names:
        raise LibraryUnavailable(f"they are for x86-64 and ARM64, and this processor is {machine}")
    return names


def build(
    variant: str, *, directory: Path | None = None, extra_flags: tuple[str, ...] = ()
) -> Path:
    """Return the library of a variant; compile it into ``directory`` if necessary.

    The default directory is the user's cache. If several processes need it at once, one compiles
    it, and the others wait. A library that others may have changed is compiled again. Raises
    `LibraryUnavailable` if there is no compiler or it fails, and if the directory is another
    user's, or cannot be used.
    """
    try:
        return _built(variant, directory, extra_flags)
    # Path.home() raises RuntimeError for a user without a home.
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        raise LibraryUnavailable(f"the library cannot be compiled: {error}") from error


def _built(variant: str, directory: Path | None, extra_flags: tuple[str, ...]) -> Path:
    flags = (*_FLAGS, *VARIANTS[variant].options, *extra_flags)
    name = f"{variant}-{_digest(flags)}.so"
    library = (directory or user_directory()) / name
    if directory is None and (BUILT / name).exists():
        return BUILT / name
    _own(library.parent)
    if not _is_ours(library):
        with _locked(library.parent):
            if not _is_ours(library):
                _compile(library, flags)
    return library


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Wait until no other process compiles into the directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _own(directory: Path) -> None:
    """Make a directory into which nobody else can write: its libraries are run. Raises
    `LibraryUnavailable` if it is another user's."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = directory.stat()
    if state.st_uid not in (os.geteuid(), 0):
        raise LibraryUnavailable(f"{directory} belongs to another user")
    if state.st_mode & _WRITABLE_BY_OTHERS:
        try:
            directory.chmod(0o700)
        except OSError as error:
            raise LibraryUnavailable(f"others may write into {directory}") from error


def _is_ours(library: Path) -> bool:
    """Whether the library exists, and nobody else can have changed it."""
    try:
        state = library.stat()
    except FileNotFoundError:
        return False
    is_owned = state.st_uid in (os.geteuid(), 0)
    return is_owned and not state.st_mode & _WRITABLE_BY_OTHERS


def _compile(library: Path, flags: tuple[str, ...]) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise LibraryUnavailable("there is no C++ compiler: install g++")
    partial = library.with_name(f".{library.name}.{os.getpid()}")
    command = [compiler, *flags, "-o", str(partial), str(_SOURCES / "native.cpp")]
    try:
        done = subprocess.run(  # noqa: S603 (our own sources and flags)
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
        if done.returncode and "simde/" in done.stderr:
            raise LibraryUnavailable("the headers of SIMDe are missing: install libsimde-dev")
        if done.returncode:
            raise LibraryUnavailable(f"{compiler} failed: {done.stderr.strip()[:500]}")
        partial.chmod(0o700)
        with partial.open("rb") as file:
            os.fsync(file.fileno())  # or a loss of power could leave an empty file of that name
        partial.rename(library)
    finally:
        partial.unlink(missing_ok=True)


def _digest(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr(flags).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def user_directory() -> Path:
    """The same as worker.checkpoints.cache.cache_directory, which must not be imported here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warren" / "native"


def cpu_flags() -> frozenset[str]:
    """What /proc/cpuinfo lists of the processor's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    of_first = (line for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(of_first, "").split())

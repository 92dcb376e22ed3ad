"""The native library as compiled for every processor."""

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from kernels.native.build import best_variant, build
from kernels.native.library import Library, choose_tiles

_WIDE = ("-DWARREN_LANES=16", "-O1", "-Wno-psabi", "-DWARREN_BF16_DOT", "-DWARREN_TILES")
"""The code for AVX-512, bfloat16 products and tile registers, executed in halves on a processor
that has only AVX2."""


@cache
def variants() -> dict[str, Library]:
    """Every way to compute that some processor chooses and that this processor can run."""
    libraries = {"avx2": Library(build("avx2"))}
    _add(libraries, "avx512 in halves", build("avx2", extra_flags=_WIDE))
    if best_variant() == "avx512":
        _add(libraries, "avx512", build("avx512"))
    return libraries


def _add(libraries: dict[str, Library], name: str, path: Path) -> None:
    """Add a library with products of bfloat16 and tile registers, and without them. A copy of the
    file is loaded a second time, with settings of its own."""
    libraries[f"{name}, bfloat16 products"] = Library(path)
    choose_tiles(libraries[f"{name}, bfloat16 products"])  # which a library that emulates them uses
    with TemporaryDirectory() as directory:
        libraries[name] = Library(Path(shutil.copy(path, directory)))
    libraries[name].use_bf16_dot(is_used=False)
    libraries[name].use_tiles(is_used=False)

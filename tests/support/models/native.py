"""The native library as compiled for every processor."""

from functools import cache

from kernels.native.build import best_variant, build
from kernels.native.library import Library

_WIDE = ("-DWARREN_LANES=16", "-O1", "-Wno-psabi")
"""The code for AVX-512, executed in halves on a processor that has only AVX2."""


@cache
def variants() -> dict[str, Library]:
    """Every way to compute that some processor chooses and that this processor can run."""
    libraries = {
        "avx2": Library(build("avx2")),
        "avx512 in halves": Library(build("avx2", extra_flags=_WIDE)),
        "avx512 in halves, bfloat16 products": Library(
            build("avx2", extra_flags=(*_WIDE, "-DWARREN_BF16_DOT"))
        ),
    }
    if best_variant() == "avx512":
        libraries["avx512, bfloat16 products"] = Library(build("avx512"))
        # Under another name it is loaded a second time, with settings of its own.
        libraries["avx512"] = Library(build("avx512", extra_flags=("-DWARREN_SECOND",)))
        libraries["avx512"].use_bf16_dot(is_used=False)
    return libraries

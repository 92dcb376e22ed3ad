"""Observes the compilation of kernels, which stalls the step that needs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the kernels that are compiled, or read from the cache on disk, in the block.

    Always empty under Triton's interpreter, which compiles nothing.
    """
    names: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        names.append(fn.name)

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before

"""Triton's interpreter without its slowest part: at each call of a function it replaces the
builtins of `triton.language`, and looks for them among all of its members."""

import inspect
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """The interpreter finds the same builtins, but remembers their names."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def names(package: object) -> list[str]:
        # Before the first call, none is replaced.
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def members(package: object) -> list[tuple[str, object]]:
        return [(name, getattr(package, name)) for name in names(package)]

    quick = SimpleNamespace(**{**vars(inspect), "getmembers": members})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "inspect", quick)
        yield

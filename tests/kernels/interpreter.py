"""Triton's interpreter without its slowest part, and with products that do not depend on the
processor.

At each call of a function the interpreter replaces the builtins of `triton.language`, and looks for
them among all of its members. Its products are those of NumPy's BLAS, which on processors without
AVX-512 sums a row in another order when it is at another place of the matrix.
"""

import inspect
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """The interpreter finds the same builtins, but remembers their names, and sums a product's rows
    alike."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def names(package: object) -> list[str]:
        # Before the first call, none is replaced.
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def members(package: object) -> list[tuple[str, object]]:
        return [(name, getattr(package, name)) for name in names(package)]

    quick = SimpleNamespace(**{**vars(inspect), "getmembers": members})
    alike = SimpleNamespace(**{**vars(np), "matmul": _product})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "inspect", quick)
        patch.setattr(interpreter, "np", alike)
        yield


def _product(left: np.ndarray, right: np.ndarray, dtype: Any) -> Any:
    """[..., m, k] times [..., k, n]; the bits of a row of the result depend on no other row."""
    columns = np.ascontiguousarray(np.swapaxes(right, -1, -2))
    rows = np.ascontiguousarray(left)
    return np.einsum("...mk,...nk->...mn", rows, columns, dtype=dtype, casting="unsafe")

"""The fields of a tuning among the options of a service."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

_Tuning = TypeVar("_Tuning")


def split(tuning: type[_Tuning], options: Mapping[str, Any]) -> tuple[_Tuning, dict[str, Any]]:
    """A ``tuning`` with the ``options`` that name its fields, and the other options."""
    names = {field.name for field in fields(tuning)}  # type: ignore[arg-type]
    chosen = {name: value for name, value in options.items() if name in names}
    return tuning(**chosen), {n: value for n, value in options.items() if n not in names}

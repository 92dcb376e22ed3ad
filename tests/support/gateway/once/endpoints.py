"""The analysis of endpoints, which takes most of the time in which a gateway is built."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

from fastapi import routing
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_dependant

_ANALYSED: dict[tuple[object, ...], Dependant] = {}


@contextmanager
def analysed_once() -> Iterator[None]:
    """Let the gateways of this process share what FastAPI finds in the signatures of endpoints: the
    functions of two gateways differ in their closures alone."""
    with patch.object(routing, "get_dependant", _analysed):
        yield


def _analysed(*, path: str, call: Callable[..., Any], scope: Literal["function"]) -> Dependant:
    function: Any = getattr(call, "__func__", call)
    key = (path, function.__code__, function.__defaults__, repr(function.__kwdefaults__))
    if key not in _ANALYSED:
        found = get_dependant(path=path, call=call, scope=scope)
        _ANALYSED[key] = replace(found, call=None)  # the function would keep its gateway
    return replace(_ANALYSED[key], call=call)

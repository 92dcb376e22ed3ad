"""JSON values of a body: read into structs, and what no job can carry refused by name."""

import re
from typing import Any, TypeVar

import msgspec

from shared.errors import InvalidRequest

MAX_DEPTH = 64
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_WITH_PARTS = frozenset(
    {"messages", "reasoning", "response_format", "stream_options", "text", "tools"}
)
"""Parameters whose parts are named, too: `messages[0].role`, but `stop` for `stop[3]`."""

_T = TypeVar("_T")


def read(value: Any, kind: type[_T], place: str = "") -> _T:
    """Read ``value``, which is at ``place`` in the body. Raises `InvalidRequest`, which names the
    part that does not fit."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _misfit(str(error), place) from None


def refused(param: str, reason: str) -> InvalidRequest:
    """An error whose message begins with the name of the parameter."""
    return InvalidRequest(f"{param}: {reason}", param=param)


def check_json(value: Any, param: str) -> None:
    """Refuse what is nested deeper than recursive readers can bear, and integers that msgpack
    cannot hold."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise refused(param, f"nested deeper than {MAX_DEPTH} levels.")
        if any(isinstance(one, int) and not -(2**63) <= one < 2**64 for one in level):
            raise refused(param, "an integer is longer than 64 bits.")
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]


def _misfit(complaint: str, place: str) -> InvalidRequest:
    """Turn msgspec's "Expected `int` - at `$.seed`" into "seed: expected `int`"."""
    reason, _, path = complaint.rpartition(" - at `") if "`$" in complaint else (complaint, "", "")
    path = place + path.removeprefix("key` in `").removeprefix("$").removesuffix("`")
    missing = _MISSING.match(reason)
    if missing and not path.startswith(".messages["):
        reason, path = "required, but missing", f"{path}.{missing[1]}"
    path = path.removeprefix(".")
    head = re.split(r"[.\[]", path, maxsplit=1)[0]
    param = path if place or head in _WITH_PARTS else head
    return refused(param, f"{reason[0].lower()}{reason[1:]}")

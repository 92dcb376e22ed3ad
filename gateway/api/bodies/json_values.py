"""JSON of any shape in a body: what no job can carry is refused, and where it lies is named."""

from typing import Any

import msgspec

from shared.errors import InvalidRequest

MAX_DEPTH = 64


def check_json(value: Any, param: str) -> None:
    """Refuse what is nested deeper than recursive readers can bear, and integers that msgpack
    cannot hold."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{param}: nested deeper than {MAX_DEPTH} levels.", param=param)
        if any(isinstance(one, int) and not -(2**63) <= one < 2**64 for one in level):
            raise InvalidRequest(f"{param}: an integer is longer than 64 bits.", param=param)
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]


def misfit(error: msgspec.ValidationError) -> tuple[str, str]:
    """What is wrong and where: "Expected `int` - at `$.a.b`" is ("expected `int`", ".a.b")."""
    reason, _, place = str(error).partition(" - at `")
    place = place.rstrip("`").removeprefix("key in ").removeprefix("$")
    return f"{reason[0].lower()}{reason[1:]}", place

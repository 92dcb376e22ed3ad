"""JSON of any shape in a body: what no job can carry is refused."""

from typing import Any

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

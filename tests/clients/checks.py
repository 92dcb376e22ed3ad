"""What a client's program checks, and how it tells: one line for each check.

Programs run in environments that have their client and nothing of Warren's.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

CAPITAL = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
OK, FAILED = "ok", "failed"


class Target(NamedTuple):
    """A deployment, as every program gets it on its command line."""

    url: str
    api_key: str
    model: str
    model_directory: str
    """As transformers reads it."""
    page_port: str
    """The deployment allows pages of this port's origin (CORS)."""


def target() -> Target:
    return Target(*sys.argv[1:])


def run(checks: Mapping[str, Any]) -> None:
    """Call all that is named ``check_*``, each with what it needs already bound."""
    for name, check in checks.items():
        if name.startswith("check_"):
            report(name.removeprefix("check_").replace("_", " "), check)


def report(name: str, check: Callable[[], None]) -> None:
    """Print whether ``check`` passed; whatever it raises is its failure."""
    try:
        check()
    except Exception as error:  # noqa: BLE001 (any client may raise anything)
        reason = " ".join(str(error).split())[:600]
        print(json.dumps([FAILED, name, f"{type(error).__name__}: {reason}"]), flush=True)
    else:
        print(json.dumps([OK, name, ""]), flush=True)


def equal(found: object, expected: object) -> None:
    """Raise where they differ, and say how."""
    if found != expected:
        raise AssertionError(f"{found!r} is not {expected!r}")


def one_of(found: object, expected: Sequence[object]) -> None:
    if found not in expected:
        raise AssertionError(f"{found!r} is none of {list(expected)!r}")


def is_weather(arguments: Any) -> None:
    """Raise where the arguments of a call are not as `WEATHER` wants them."""
    equal(set(arguments), {"city", "unit"})
    one_of(arguments["city"], WEATHER["properties"]["city"]["enum"])
    one_of(arguments["unit"], WEATHER["properties"]["unit"]["enum"])

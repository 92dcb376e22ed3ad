"""The checks of a client's program, with a line of output for each.

Programs run in environments that contain their client but not Warren.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

CAPITAL = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
LONG_STORY = "Tell me a long story."
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
OK, FAILED = "ok", "failed"
_Error = TypeVar("_Error", bound=Exception)


class Target(NamedTuple):
    """A deployment, as given to each program on its command line."""

    url: str
    api_key: str
    model: str
    model_directory: str
    """The model in the format that transformers reads."""
    page_port: str
    """The port whose origin the deployment allows (CORS)."""


def target() -> Target:
    """The deployment of the command line. From now on, what libraries print is an error output:
    the standard output has the verdicts alone."""
    sys.stdout = sys.stderr
    return Target(*sys.argv[1:])


def run(checks: Mapping[str, Any]) -> None:
    """Call every function named ``check_*`` with its arguments bound."""
    for name, check in checks.items():
        if name.startswith("check_"):
            report(name.removeprefix("check_").replace("_", " "), check)


def report(name: str, check: Callable[[], None]) -> None:
    """Print whether ``check`` passed. An exception is a failure."""
    try:
        check()
    except Exception as error:  # noqa: BLE001 (any client may raise anything)
        reason = " ".join(str(error).split())[:600]
        verdict = [FAILED, name, f"{type(error).__name__}: {reason}"]
    else:
        verdict = [OK, name, ""]
    print(json.dumps(verdict), file=sys.__stdout__, flush=True)


def batch_lines(model: str, content: str, **more: object) -> bytes:
    """The file of a batch of two equal chats."""
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
    lines = (
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**body, **more},
        }
        for custom_id in "12"
    )
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def printed_lines(command: Sequence[object], cwd: Path, env: Mapping[str, str]) -> list[Any]:
    """The JSON objects that a command prints in its lines. Raises if it fails."""
    printed = subprocess.run(
        [str(argument) for argument in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        check=True,
        text=True,
    ).stdout
    print(printed, file=sys.stderr)
    return [json.loads(line) for line in printed.splitlines()]


def equal(found: object, expected: object) -> None:
    """Raise with both values if they differ."""
    if found != expected:
        raise AssertionError(f"{found!r} is not {expected!r}")


def one_of(found: object, expected: Sequence[object]) -> None:
    if found not in expected:
        raise AssertionError(f"{found!r} is none of {list(expected)!r}")


def raised(kind: type[_Error], call: Callable[[], object]) -> _Error:
    """The exception of this kind that ``call`` raises. Raise if there is none."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def is_weather(arguments: Any) -> None:
    """Raise if the arguments of a call do not match `WEATHER`."""
    equal(set(arguments), {"city", "unit"})
    one_of(arguments["city"], WEATHER["properties"]["city"]["enum"])
    one_of(arguments["unit"], WEATHER["properties"]["unit"]["enum"])

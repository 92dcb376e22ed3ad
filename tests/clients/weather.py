"""A tool, and a question after which a model of 135 million parameters calls it in auto mode.

The model copies a call that it is asked to repeat, and then repeats the tool's result. So the
checks know which call and which answer a correct server returns in an agent's loop.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import BaseModel

from tests.clients.checks import equal

_SUNNY = "It is sunny in Rome."
CALLING = """\
Repeat: <tool_call>
{"name": "weather", "arguments": {"city": "Rome", "unit": "C"}}
</tool_call>"""
ANSWERING = 'Repeat: {"city": "Rome", "unit": "C"}'
"""Answered by text although the model may call the tool."""
ASKING = "The weather in Rome?"
_called: list[tuple[str, str]] = []


class Weather(BaseModel):
    """The arguments of the tool, and the schema of structured answers."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


def weather(city: Literal["Paris", "Rome"], unit: Literal["C", "F"]) -> str:
    """Tell the weather.

    Args:
        city: The city.
        unit: The unit.
    """
    _called.append((city, unit))
    return _SUNNY


@contextmanager
def one_call() -> Iterator[None]:
    """Raise unless `weather` is called once within, as `CALLING` asks."""
    _called.clear()
    yield
    equal(_called, [("Rome", "C")])


def is_sunny(answer: str) -> None:
    """Raise unless the answer has what the tool returned."""
    if "sunny" not in answer.lower():
        raise AssertionError(f"{answer!r} has no result of the tool")

"""instructor: schemas as pydantic writes them, and forced calls."""

from typing import Any, Literal

import instructor  # type: ignore[import-not-found]
import openai
from pydantic import BaseModel

from tests.clients.checks import CAPITAL, run, target

TARGET = target()
OPENAI = openai.OpenAI(base_url=f"{TARGET.url}/v1", api_key=TARGET.api_key, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": CAPITAL}]


class City(BaseModel):
    """A city. Its schema has no additionalProperties."""

    name: Literal["Paris", "Rome"]
    is_capital: bool


def extracted(mode: Any) -> None:
    """Raise unless the first answer is a city, in few tokens."""
    client = instructor.from_openai(OPENAI, mode=mode)
    city, answer = client.chat.completions.create_with_completion(
        model=TARGET.model,
        messages=MESSAGES,
        response_model=City,
        max_retries=0,
        max_tokens=64,
        temperature=0,
    )

    assert isinstance(city, City)
    assert answer.choices[0].finish_reason in ("stop", "tool_calls"), answer


def check_json_schema() -> None:
    extracted(instructor.Mode.JSON_SCHEMA)


def check_tools() -> None:
    extracted(instructor.Mode.TOOLS)


if __name__ == "__main__":
    run(globals())

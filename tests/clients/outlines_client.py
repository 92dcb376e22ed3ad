"""outlines: its models for OpenAI's API and for vLLM's extensions of it."""

import json
from typing import Any, Literal

import openai
import outlines  # type: ignore[import-not-found]

from tests.clients.checks import ANSWER, CAPITAL, WEATHER, equal, is_weather, one_of, run, target
from tests.clients.weather import ASKING, Weather

TARGET = target()
CLIENT = openai.OpenAI(base_url=f"{TARGET.url}/v1", api_key=TARGET.api_key, max_retries=0)
MODEL = outlines.from_openai(CLIENT, TARGET.model)
VLLM = outlines.from_vllm(CLIENT, TARGET.model)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 48}


def check_chat() -> None:
    equal(MODEL(CAPITAL, **GREEDY), ANSWER)


def check_chat_streamed() -> None:
    pieces = list(MODEL.stream(CAPITAL, **GREEDY))

    equal("".join(pieces), ANSWER)
    assert len(pieces) > 1


def check_structured_output() -> None:
    Weather.model_validate_json(MODEL(ASKING, Weather, **GREEDY))


def check_structured_output_streamed() -> None:
    streamed = "".join(MODEL.stream(ASKING, Weather, **GREEDY))

    equal(streamed, MODEL(ASKING, Weather, **GREEDY))


def check_choice() -> None:
    one_of(VLLM(CAPITAL, Literal["Paris", "Rome"], **GREEDY), ["Paris", "Rome"])


def check_expression() -> None:
    answer = VLLM("A number?", outlines.types.Regex("[0-9]{3}"), **GREEDY)

    equal((len(answer), answer.isdecimal()), (3, True))


def check_json_schema() -> None:
    schema = outlines.json_schema(json.dumps(WEATHER))

    is_weather(json.loads(VLLM(ASKING, schema, **GREEDY)))


if __name__ == "__main__":
    run(globals())

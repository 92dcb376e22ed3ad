"""guidance: its model for OpenAI's API, and its model for vLLM, which sends whole grammars."""

import json
from typing import Any

from guidance import assistant, gen, models, regex, select, user  # type: ignore[import-not-found]
from guidance import json as as_json
from guidance.models.experimental import VLLMModel  # type: ignore[import-not-found]

from tests.clients.checks import ANSWER, CAPITAL, WEATHER, equal, is_weather, one_of, run, target
from tests.clients.weather import ASKING

TARGET = target()
COMMON: dict[str, Any] = {
    "base_url": f"{TARGET.url}/v1",
    "api_key": TARGET.api_key,
    "echo": False,
}


def answered(model: Any, question: str, answer: Any) -> str:
    with user():
        model += question
    with assistant():
        model += answer
    return str(model["answer"])


def openai() -> Any:
    return models.OpenAI(TARGET.model, **COMMON)


def vllm() -> Any:
    return VLLMModel(TARGET.model, **COMMON)


def check_chat() -> None:
    equal(answered(openai(), CAPITAL, gen("answer", temperature=1e-6, max_tokens=48)), ANSWER)


def check_structured_output() -> None:
    is_weather(json.loads(answered(openai(), ASKING, as_json("answer", schema=WEATHER))))


def check_choice_by_a_grammar() -> None:
    one_of(answered(vllm(), CAPITAL, select(["Paris", "Rome"], name="answer")), ["Paris", "Rome"])


def check_expression_by_a_grammar() -> None:
    answer = answered(vllm(), "A number of three digits?", regex("[0-9]{3}", name="answer"))

    equal((len(answer), answer.isdecimal()), (3, True))


def check_structured_output_by_a_grammar() -> None:
    is_weather(json.loads(answered(vllm(), ASKING, as_json("answer", schema=WEATHER))))


if __name__ == "__main__":
    run(globals())

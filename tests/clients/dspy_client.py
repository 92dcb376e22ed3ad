"""DSPy: its language model, over chat completions and responses.

Its signatures are not checked: for a model that it does not know, it describes their forms in the
prompt, and a small model does not follow them.
"""

import json
from typing import Any

import dspy  # type: ignore[import-not-found]

from tests.clients.checks import ANSWER, CAPITAL, WEATHER, equal, is_weather, run, target
from tests.clients.weather import ASKING, CALLING

TARGET = target()


def model(**options: Any) -> Any:
    return dspy.LM(
        f"openai/{TARGET.model}",
        api_base=f"{TARGET.url}/v1",
        api_key=TARGET.api_key,
        temperature=0,
        max_tokens=48,
        cache=False,
        num_retries=0,
        **options,
    )


def check_chat() -> None:
    equal(model()(CAPITAL), [ANSWER])


def check_response() -> None:
    (answer,) = model(model_type="responses")(CAPITAL)

    equal(answer if isinstance(answer, str) else answer["text"], ANSWER)


def check_tool_is_called() -> None:
    function = {"name": "weather", "parameters": WEATHER}
    (answer,) = model()(CALLING, tools=[{"type": "function", "function": function}])
    (call,) = answer["tool_calls"]

    is_weather(json.loads(dict(dict(call)["function"])["arguments"]))


def check_structured_output() -> None:
    schema = {"name": "weather", "schema": WEATHER, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    (answer,) = model()(ASKING, response_format=form)

    is_weather(json.loads(answer))


if __name__ == "__main__":
    run(globals())

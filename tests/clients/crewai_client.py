"""CrewAI: its model for vLLM's API, and a crew of one agent."""

import os
from typing import Any

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"

from crewai import LLM, Agent, Crew, Task  # type: ignore[import-not-found]

from tests.clients.checks import ANSWER, CAPITAL, WEATHER, equal, run, target
from tests.clients.weather import (
    ASKING,
    CALLING,
    Weather,
    is_sunny,
    one_call,
    weather,
)

TARGET = target()


def model(**options: Any) -> Any:
    return LLM(
        f"hosted_vllm/{TARGET.model}",
        base_url=f"{TARGET.url}/v1",
        api_key=TARGET.api_key,
        temperature=0,
        max_tokens=48,
        **options,
    )


def crew(question: str) -> Any:
    agent = Agent(role="assistant", goal="answer", backstory="", llm=model(), max_iter=2)
    task = Task(description=question, expected_output="an answer", agent=agent)
    return Crew(agents=[agent], tasks=[task])


def check_chat() -> None:
    equal(model().call(CAPITAL), ANSWER)


def check_chat_streamed() -> None:
    equal(model(stream=True).call(CAPITAL), ANSWER)


def check_structured_output() -> None:
    answer = model().call(ASKING, response_model=Weather)

    assert isinstance(
        answer if isinstance(answer, Weather) else Weather.model_validate_json(answer), Weather
    )


def check_crew() -> None:
    assert crew(CAPITAL).kickoff().raw


def check_tool_is_called() -> None:
    """By the model alone: a crew adds so much to the question that a small model does not call."""
    function = {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER}
    with one_call():
        answer = model().call(
            CALLING,
            tools=[{"type": "function", "function": function}],
            available_functions={"weather": weather},
        )
    is_sunny(str(answer))


if __name__ == "__main__":
    run(globals())

"""What programs may give as prompts."""

from typing import Any

import pytest

from shared.client.prompts import PromptLike, chat_prompts, checked, prompts_of
from shared.errors import InvalidRequest
from shared.messages import (
    ChatMessage,
    ChatPrompt,
    GenerationJob,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
)

QUESTION: dict[str, Any] = {"role": "user", "content": "How warm is it?"}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", [TextPrompt(text="a")]),
        (["a", "b"], [TextPrompt(text="a"), TextPrompt(text="b")]),
        ([1, 2], [TokenPrompt(token_ids=(1, 2))]),
        ([[1], [2]], [TokenPrompt(token_ids=(1,)), TokenPrompt(token_ids=(2,))]),
        (["a", [2]], [TextPrompt(text="a"), TokenPrompt(token_ids=(2,))]),
        (TextPrompt(text="a"), [TextPrompt(text="a")]),
    ],
)
def test_a_prompt_is_a_text_or_token_ids(given: PromptLike, prompts: list[object]) -> None:
    assert prompts_of(given) == prompts


def test_one_conversation_or_several_become_prompts() -> None:
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content="How warm is it?"),))

    assert chat_prompts([QUESTION]) == [prompt]
    assert chat_prompts([[QUESTION], [QUESTION]]) == [prompt, prompt]
    assert chat_prompts(prompt.messages) == [prompt]


@pytest.mark.parametrize("tool", [FUNCTION, {"type": "function", "function": FUNCTION}])
def test_tools_and_calls_may_have_openais_form(tool: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    asked: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}

    (prompt,) = chat_prompts([QUESTION, asked], [tool])

    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == (Tool(name="weather", parameters={"type": "object"}),)
    assert prompt.messages[1].tool_calls == (ToolCall(id="c", name="weather", arguments="{}"),)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no message"),
        ([{"role": "user", "contnt": "a"}], "unknown field 'contnt'"),
        ([{"role": "user", "content": 3}], "Expected `str`"),
    ],
)
def test_messages_that_no_worker_understands_are_refused(messages: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        chat_prompts(messages)


@pytest.mark.parametrize("given", ["", []])
def test_a_prompt_is_not_empty(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="no prompt"):
        prompts_of(given)


def test_parameters_beyond_their_range_are_named() -> None:
    job = GenerationJob(
        request_id="r",
        model="m",
        prompts=(TextPrompt(text="a"),),
        sampling=SamplingParams(temperature=-1.0),
    )

    with pytest.raises(InvalidRequest, match=r"`\$\.sampling\.temperature`$"):
        checked(job)

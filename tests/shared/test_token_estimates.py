"""How many tokens a request is taken to have before a worker has counted them."""

from typing import Any

import pytest

from shared.messages import (
    ChatMessage,
    ChatPrompt,
    GenerationJob,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
)
from shared.messages.token_estimates import tokens_of

LONG = "word " * 800
MESSAGE = ChatMessage(role="user", content="Hi")


def estimate(prompt: Prompt, num_choices: int = 1) -> int:
    sampling = SamplingParams(max_tokens=10)
    return tokens_of(
        GenerationJob(
            request_id="r",
            model="m",
            prompts=(prompt,),
            num_choices=num_choices,
            sampling=sampling,
        )
    )


@pytest.mark.parametrize(
    "parts",
    [
        {"messages": (ChatMessage(role="user", content=LONG),)},
        {"messages": (ChatMessage(role="assistant", reasoning_content=LONG),)},
        {
            "messages": (
                ChatMessage(
                    role="assistant", tool_calls=(ToolCall(id="1", name="f", arguments=LONG),)
                ),
            )
        },
        {"messages": (ChatMessage(role="user", name=LONG),)},
        {"messages": (MESSAGE,), "tools": (Tool(name="f", description=LONG),)},
        {
            "messages": (MESSAGE,),
            "tools": (Tool(name="f", parameters={"properties": {LONG: {"type": "string"}}}),),
        },
        {"messages": (MESSAGE,), "template_kwargs": {"documents": [LONG]}},
    ],
    ids=["content", "reasoning", "call", "name", "tool", "parameters", "template"],
)
def test_whatever_a_template_may_write_counts(parts: dict[str, Any]) -> None:
    assert 1000 < estimate(ChatPrompt(**parts)) < 1100


def test_a_short_message_is_its_text() -> None:
    assert estimate(ChatPrompt(messages=(ChatMessage(role="user", content="Hello!"),))) == 12


def test_texts_count_by_bytes_and_token_ids_by_number() -> None:
    assert estimate(TextPrompt(text="日本語です。" * 20)) == 10 + 90
    assert estimate(TokenPrompt(token_ids=(1,) * 50)) == 10 + 50


def test_every_choice_has_an_answer() -> None:
    assert estimate(TokenPrompt(token_ids=(1,)), num_choices=4) == 41

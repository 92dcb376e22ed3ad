"""Tools for a model whose chat template has none."""

from pathlib import Path

import pytest

from shared.errors import InvalidRequest
from shared.messages import ChatMessage, ChatPrompt, Tool, ToolCall
from worker.text import Tokenizer
from worker.text.chat_template import ChatTemplate
from worker.text.written_tools import with_written_tools

USER = ChatMessage(role="user", content="The weather in Rome?")
WEATHER = Tool(name="weather", description="Of a “city”", parameters={"type": "object"})
CALL = ToolCall(id="c1", name="weather", arguments='{"city": "Rome"}')
WRITTEN_TOOL = (
    '<tools>\n{"type": "function", "function": {"name": "weather", "description": "Of a “city”", '
    '"parameters": {"type": "object"}}}\n</tools>'
)
WRITTEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_tools_are_described_before_the_conversation() -> None:
    system, user = with_written_tools(ChatPrompt(messages=(USER,), tools=(WEATHER,))).messages

    assert (system.role, user) == ("system", USER)
    assert WRITTEN_TOOL in system.content


def test_tools_are_described_after_the_system_message() -> None:
    brief = ChatMessage(role="system", content="Be brief.")
    prompt = ChatPrompt(messages=(brief, USER), tools=(WEATHER,))

    system, user = with_written_tools(prompt).messages

    assert user == USER
    assert system.content.startswith("Be brief.\n\n")
    assert WRITTEN_TOOL in system.content


def test_calls_are_the_assistants_text_and_their_results_one_message_of_the_user() -> None:
    calling = ChatMessage(role="assistant", content="Let me see.", tool_calls=(CALL, CALL))
    results = [ChatMessage(role="tool", content=said, tool_call_id="c1") for said in ("hot", "dry")]

    prompt = with_written_tools(ChatPrompt(messages=(USER, calling, *results)))

    assert prompt.messages == (
        USER,
        ChatMessage(role="assistant", content=f"Let me see.\n{WRITTEN_CALL}\n{WRITTEN_CALL}"),
        ChatMessage(
            role="user",
            content="<tool_response>\nhot\n</tool_response>\n<tool_response>\ndry\n</tool_response>",
        ),
    )


@pytest.mark.parametrize("refusal", ["{{ raise_exception('no system') }}", ""])
def test_tools_are_described_by_the_user_if_the_template_takes_no_system_message(
    refusal: str,
) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'system' %}" + refusal + "{% else %}"
        "{{ m.role }}: {{ m.content }}<end>{% endif %}{% endfor %}",
        {},
    )

    text = template.render(ChatPrompt(messages=(USER,), tools=(WEATHER,)))

    assert text.startswith("user: You may call functions")
    assert WRITTEN_TOOL in text
    assert text.endswith(f"\n\n{USER.content}<end>")


def test_a_system_message_that_the_template_refuses_is_refused_with_tools_too() -> None:
    template = ChatTemplate(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}", {}
    )
    system = ChatMessage(role="system", content="Be brief.")

    with pytest.raises(InvalidRequest, match="no system"):
        template.render(ChatPrompt(messages=(system, USER), tools=(WEATHER,)))


DEEPSEEK = """\
{%- for message in messages %}{{- message.role + ': ' }}
{%- if message.role == 'assistant' and message['tool_calls'] %}
{%- for one in message['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>' + one.type + '<｜tool▁sep｜>' + one.function.name + BLOCK }}
{{- ARGUMENTS + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{%- endif %}
{%- if message['content'] is not none %}{{- message['content'] + '<end>' }}{% endif %}
{%- endfor %}"""
"""As DeepSeek's templates are: they have calls, but no tools."""


@pytest.mark.parametrize(
    ("block", "example"),
    [
        ("'\\n```json\\n'", '>function<｜tool▁sep｜>function name\n```json\n{"argument"'),
        ("'<｜tool▁sep｜>'", '>function name<｜tool▁sep｜>{"argument"'),
    ],
)
@pytest.mark.parametrize(
    "arguments", ["one.function.arguments", "one['function']['arguments']|tojson"]
)
def test_deepseek_is_asked_for_calls_in_its_own_form(
    arguments: str, block: str, example: str
) -> None:
    source = DEEPSEEK.replace("BLOCK", block).replace("ARGUMENTS", arguments)
    template = ChatTemplate(source, {})
    calling = ChatMessage(role="assistant", tool_calls=(CALL,))
    result = ChatMessage(role="tool", content="hot", tool_call_id="c1")

    text = template.render(ChatPrompt(messages=(USER, calling, result), tools=(WEATHER,)))

    system, conversation = text.split("<end>", 1)
    assert WRITTEN_TOOL in system
    assert example in system
    assert "<tool_call>" not in text
    assert '{"city": "Rome"}<｜tool▁call▁end｜>tool: hot<end>' in conversation


def test_a_conversation_without_tools_stays_as_it_is() -> None:
    prompt = ChatPrompt(messages=(USER, ChatMessage(role="assistant"), USER))

    assert with_written_tools(prompt) == prompt


def test_smollm2_is_given_its_tools(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)

    text = tokenizer.decode(tokenizer.encode(ChatPrompt(messages=(USER,), tools=(WEATHER,))))

    assert text.startswith("<|im_start|>system\nYou may call functions")
    assert WRITTEN_TOOL in text
    assert text.endswith(
        "<|im_start|>user\nThe weather in Rome?<|im_end|>\n<|im_start|>assistant\n"
    )

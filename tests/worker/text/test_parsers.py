"""Which tool and reasoning parsers a model needs, according to its files."""

from pathlib import Path

import pytest

from shared.messages import ChatMessage, ChatPrompt, ReasoningSwitch, Tool
from tests.support.text.tokenizers import byte_level_tokenizer, save_tokenizer
from worker.text import (
    Tokenizer,
    reasoning_parser,
    reasoning_switches,
    tool_parser,
    with_known_calls,
)


def load(directory: Path, template: str, *entries: str) -> Tokenizer:
    encoder = byte_level_tokenizer()
    encoder.add_tokens(list(entries))
    return Tokenizer.load(
        save_tokenizer(encoder, directory, tokenizer_config={"chat_template": template})
    )


@pytest.mark.parametrize(
    ("template", "entries", "parser"),
    [
        ("{% if tools %}<tool_call>{% endif %}", [], "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}", ["[TOOL_CALLS]"], "mistral"),
        ("{% if tools %}Environment: ipython{% endif %}", ["<|python_tag|>"], "llama3_json"),
        ("{% if tools %}<tool_call>\n<function=f>{% endif %}", [], "qwen3_coder"),
        ("{% if tools %}<tool_call>f\n<arg_key>{% endif %}", [], "glm45"),
        ("{% if tools %}<｜tool▁call▁begin｜>{% endif %}", [], "deepseek_v3"),
        ("{% if tools %}<|tool_call_begin|>{% endif %}", [], "kimi_k2"),
        ("{% if tools %}tool_declare{% endif %}", ["<|tool_call_begin|>"], "kimi_k2"),
        ("{% if tools %}<start_function_call>{% endif %}", [], "functiongemma"),
        ("{% if tools %}<|tool_call>call:{% endif %}", [], "gemma4"),
        ("{% if tools %}<|channel|>analysis<|message|>{% endif %}", [], "harmony"),
        ("{% if tools %}[func_name1(a=b)]{% endif %}", ["<|python_tag|>"], "pythonic"),
        (
            '{% if tools %}{"name": function name, "parameters": dictionary of argument name'
            "{% endif %}",
            [],
            "llama3_json",
        ),
        ("{% if tools %}calls{% endif %}", [], None),
        ("{% if message.tool_calls %}<｜tool▁call▁begin｜>{% endif %}", [], "deepseek_v3"),
        ("{{ messages[0].content }}", ["<|python_tag|>"], "hermes"),
    ],
    ids=[
        "hermes",
        "mistral",
        "llama3",
        "qwen3_coder",
        "glm45",
        "deepseek_v3",
        "kimi_k2",
        "kimi_k2 by its vocabulary",
        "functiongemma",
        "gemma4",
        "harmony",
        "pythonic",
        "llama4",
        "of its own",
        "deepseek without tools",
        "none",
    ],
)
def test_the_form_of_calls_is_inferred_from_template_and_vocabulary(
    template: str, entries: list[str], parser: str | None, tmp_path: Path
) -> None:
    assert tool_parser(load(tmp_path, template, *entries)) == parser


@pytest.mark.parametrize(
    ("template", "entries", "parser"),
    [
        ("{{ messages[0].content }}<think>\n", ["</think>"], "deepseek_r1"),
        ("{{ messages[0].content }}<think>", [], "deepseek_r1"),
        ("{{ messages[0].content.split('<think>')[0] }}", [], "qwen3"),
        ("{{ messages[0].content }}", ["</think>"], "qwen3"),
        ("{{ raise_exception('more, please') }}", ["</think>"], "qwen3"),
        ("{{ messages[0].content }}", ["<|channel>", "<channel|>"], "gemma4"),
        ("<|channel|>analysis<|message|>", [], "harmony"),
        ("{{ messages[0].content }}", [], None),
    ],
    ids=[
        "begun by the template",
        "begun by the template, and no token",
        "begun by the model, and no token",
        "begun by the model",
        "a strict template",
        "gemma4",
        "harmony",
        "none",
    ],
)
def test_the_form_of_thoughts_is_inferred_from_template_and_vocabulary(
    template: str, entries: list[str], parser: str | None, tmp_path: Path
) -> None:
    assert reasoning_parser(load(tmp_path, template, *entries)) == parser


@pytest.mark.parametrize(
    ("template", "switches"),
    [
        (
            "{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}",
            [ReasoningSwitch(variable="enable_thinking", value=False, parser="qwen3")],
        ),
        (
            "{{ '<think>' if thinking else '</think>' }}",
            [ReasoningSwitch(variable="thinking", value=True, parser="deepseek_r1")],
        ),
        ("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", []),
        ("<think>", []),
    ],
    ids=["closes the thought", "opens a thought", "writes an empty one", "without a switch"],
)
def test_a_variable_that_opens_or_closes_the_thought_switches_its_form(
    template: str, switches: list[ReasoningSwitch], tmp_path: Path
) -> None:
    tokenizer = load(tmp_path, template, "</think>")

    assert [*reasoning_switches(tokenizer)] == switches
    assert reasoning_switches(tokenizer, "deepseek_r1") == ()


def test_a_setting_wins(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{% if tools %}<tool_call>{% endif %}", "</think>")

    assert (tool_parser(tokenizer, "none"), reasoning_parser(tokenizer, "none")) == (None, None)
    assert tool_parser(tokenizer, "mistral") == "mistral"
    assert reasoning_parser(tokenizer, "deepseek_r1") == "deepseek_r1"


def test_a_model_with_unknown_calls_is_asked_for_those_of_hermes(tmp_path: Path) -> None:
    template = "{% if tools %}odd {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt = ChatPrompt(
        messages=(ChatMessage(role="user", content="?"),), tools=(Tool(name="weather"),)
    )
    loaded = load(tmp_path, template)

    tokenizer, parser = with_known_calls(loaded)

    text = tokenizer.decode(tokenizer.encode(prompt))
    assert parser == "hermes"
    assert text.startswith("You may call functions")
    assert "weather" in text
    for setting, kept in (("pythonic", "pythonic"), ("none", None)):
        tokenizer, parser = with_known_calls(loaded, setting)
        assert parser == kept
        assert tokenizer.decode(tokenizer.encode(prompt)) == "odd ?"


def test_smollm2_calls_in_the_default_form(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)

    assert (tool_parser(tokenizer), reasoning_parser(tokenizer)) == ("hermes", None)

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Encoder
from transformers import PreTrainedTokenizerFast

from shared.errors import InvalidRequest, StartupError
from shared.messages import ChatMessage, ChatPrompt
from tests.support.tokenizers import byte_level_tokenizer, save_tokenizer
from worker.text import Tokenizer
from worker.text.chat_template import ChatTemplate

LLAMA_STYLE = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'Today is ' + strftime_now('%Y') %}
{%- endif %}
{{- bos_token + '<<SYS>>' + system + '<</SYS>>' }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate.') }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- endif %}
{%- endfor %}
"""
TOOL_STYLE = """
{% set ns = namespace(count=0) %}
    {% for message in messages %}
    {% set ns.count = ns.count + 1 %}
<|{{ message.role }}|>{{ message | tojson }}{{ tools is none and documents is none }}
    {% if ns.count > 3 %}
        {% break %}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{{ pad_token is defined }}{% endif %}
"""
CHATS = [
    [("user", "What is the capital of France?")],
    [("system", " Be brief. "), ("user", "<b>&'é世🙂"), ("assistant", "Yes.\n"), ("user", "")],
    [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", ""), ("user", "4")],
]


def prompt(chat: list[tuple[Any, str]]) -> ChatPrompt:
    return ChatPrompt(messages=tuple(ChatMessage(role=role, content=text) for role, text in chat))


def by_transformers(directory: Path, chat: list[tuple[Any, str]]) -> list[int]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
    messages = [{"role": role, "content": text} for role, text in chat]
    encoding = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return list(encoding["input_ids"])


@pytest.mark.parametrize("chat", CHATS)
def test_smollm2_is_asked_as_transformers_asks_it(
    chat: list[tuple[str, str]], smollm2: Path
) -> None:
    assert Tokenizer.load(smollm2).encode(prompt(chat)) == by_transformers(smollm2, chat)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", [LLAMA_STYLE, TOOL_STYLE], ids=["llama", "tools"])
def test_other_styles_are_rendered_as_transformers_renders_them(
    template: str, chat: list[tuple[str, str]], tmp_path: Path
) -> None:
    save_tokenizer(
        byte_level_tokenizer(),
        tmp_path,
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "</s>",
            "eos_token": "</s>",
            "chat_template": template,
        },
    )

    assert Tokenizer.load(tmp_path).encode(prompt(chat)) == by_transformers(tmp_path, chat)


def test_the_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    save_tokenizer(byte_level_tokenizer(), tmp_path, tokenizer_config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new")

    token_ids = Tokenizer.load(tmp_path).encode(prompt(CHATS[0]))

    assert Encoder.from_file(str(tmp_path / "tokenizer.json")).decode(token_ids) == "new"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    save_tokenizer(byte_level_tokenizer(), tmp_path, tokenizer_config={"chat_template": templates})

    token_ids = Tokenizer.load(tmp_path).encode(prompt(CHATS[0]))

    assert Encoder.from_file(str(tmp_path / "tokenizer.json")).decode(token_ids) == "yes"


def test_a_message_bears_its_name() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.name is defined }},{% endfor %}", {})

    text = template.render(
        [ChatMessage(role="user", name="ada"), ChatMessage(role="user", content="x")]
    )

    assert text == "True,False,"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{{ messages[7].content.missing }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
    ],
    ids=["raised by the template", "wrong type", "missing", "mutation", "escape"],
)
def test_what_a_template_cannot_render_is_the_requests_fault(source: str, reason: str) -> None:
    template = ChatTemplate(source, {})

    with pytest.raises(InvalidRequest, match=reason) as error:
        template.render([ChatMessage(role="user", content="secret")])

    assert error.value.param == "messages"


def test_a_template_of_wrong_syntax_stops_the_start() -> None:
    with pytest.raises(StartupError, match="chat template"):
        ChatTemplate("{% for %}", {})


def test_text_needs_no_transformers(smollm2: Path) -> None:
    script = (
        "import json, pathlib, sys; from worker.text import Tokenizer;"
        "Tokenizer.load(pathlib.Path(sys.argv[1]));"
        "print(json.dumps([m for m in ('transformers', 'torch') if m in sys.modules]))"
    )

    result = subprocess.run(
        [sys.executable, "-c", script, str(smollm2)], capture_output=True, check=True
    )

    assert json.loads(result.stdout) == []

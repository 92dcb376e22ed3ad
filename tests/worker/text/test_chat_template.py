import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as Encoder
from transformers import PreTrainedTokenizerFast

from shared.errors import ContextLengthExceeded, InvalidRequest, StartupError
from shared.messages import ChatMessage, ChatPrompt, Tool, ToolCall
from tests.support.text.tokenizers import byte_level_tokenizer, save_tokenizer
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
    return rendered(directory, [{"role": role, "content": text} for role, text in chat])


def rendered(directory: Path, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
    encoding = tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True} | options)
    return list(encoding["input_ids"])


HERMES_STYLE = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}
<|{{ message.role }}|>{{ message.content }}
    {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
    {%- endfor %}
    {%- if message.tool_call_id is defined %} of {{ message.tool_call_id }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ "" if mood is not defined else mood }}{% endif %}
"""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALLED = ChatPrompt(
    messages=(
        ChatMessage(role="user", content="Weather?"),
        ChatMessage(
            role="assistant",
            tool_calls=(ToolCall(id="c1", name="weather", arguments='{"city": "Rome"}'),),
            reasoning_content="Rome it is.",
        ),
        ChatMessage(role="tool", content="sunny", tool_call_id="c1"),
    ),
    tools=(Tool(name="weather", description="Of a city", parameters=SCHEMA), Tool(name="time")),
    template_kwargs={"mood": "glad", "messages": "not these"},
)
AS_TRANSFORMERS_HAS_IT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Rome it is.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Rome"}},
            }
        ],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "time", "parameters": {}}},
]


def test_arguments_that_are_nested_too_deeply_are_refused() -> None:
    call = ToolCall(id="c1", name="weather", arguments="[" * 100_000)
    template = ChatTemplate("{{ tools }}", {})

    with pytest.raises(InvalidRequest, match="nested too deeply"):
        template.render(ChatPrompt(messages=(ChatMessage(role="assistant", tool_calls=(call,)),)))


def with_template(directory: Path, template: str) -> Path:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "</s>",
        "eos_token": "</s>",
        "chat_template": template,
    }
    return save_tokenizer(byte_level_tokenizer(), directory, tokenizer_config=config)


def test_tools_and_calls_are_rendered_as_transformers_renders_them(tmp_path: Path) -> None:
    directory = with_template(tmp_path, HERMES_STYLE)

    assert Tokenizer.load(directory).encode(CALLED) == rendered(
        directory, AS_TRANSFORMERS_HAS_IT, tools=TOOLS, mood="glad"
    )


@pytest.mark.parametrize("template", [LLAMA_STYLE, HERMES_STYLE], ids=["llama", "hermes"])
def test_the_final_message_is_continued_where_transformers_continues_it(
    template: str, tmp_path: Path
) -> None:
    directory = with_template(tmp_path, template)
    chat = [("user", "Count."), ("assistant", "One, two,")]
    asked = msgspec.structs.replace(prompt(chat), continue_final_message=True)

    assert Tokenizer.load(directory).encode(asked) == rendered(
        directory,
        [{"role": role, "content": text} for role, text in chat],
        add_generation_prompt=False,
        continue_final_message=True,
    )


def test_a_final_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    asked = msgspec.structs.replace(prompt(CHATS[0]), continue_final_message=True)

    with pytest.raises(InvalidRequest, match="cannot be continued"):
        ChatTemplate("nothing", {}).render(asked)


def test_a_message_with_calls_cannot_be_continued() -> None:
    call = ToolCall(id="1", name="f", arguments="{}")
    message = ChatMessage(role="assistant", content="", tool_calls=(call,))
    continued = ChatPrompt(messages=(message,), continue_final_message=True)

    with pytest.raises(InvalidRequest, match="cannot be continued"):
        ChatTemplate(TOOL_STYLE, {}).render(continued)


def test_half_of_a_surrogate_pair_in_the_arguments_of_a_call_is_replaced() -> None:
    call = ToolCall(id="1", name="f", arguments='{"a": "\\ud83d"}')
    message = ChatMessage(role="assistant", content="", tool_calls=(call,))

    text = ChatTemplate(TOOL_STYLE + "{{ tools }}", {}).render(ChatPrompt(messages=(message,)))

    assert '{"a": "?"}' in text


def test_the_generation_prompt_may_be_left_out(tmp_path: Path) -> None:
    directory = with_template(tmp_path, HERMES_STYLE)
    asked = msgspec.structs.replace(prompt(CHATS[0]), add_generation_prompt=False)

    assert Tokenizer.load(directory).encode(asked) == rendered(
        directory, [{"role": "user", "content": CHATS[0][0][1]}], add_generation_prompt=False
    )


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


def test_an_output_has_the_name_of_its_function_if_the_template_wants_it() -> None:
    call = ToolCall(id="c1", name="f", arguments="{}")
    chat = ChatPrompt(
        messages=(
            ChatMessage(role="assistant", tool_calls=(call,)),
            ChatMessage(role="tool", content="sunny", tool_call_id="c1"),
            ChatMessage(role="tool", content="rain", tool_call_id="c1", name="g"),
            ChatMessage(role="tool", content="lost", tool_call_id="c2"),
        )
    )
    named = "{% for m in messages %}{{ m.name }} {% endfor %}{{ tools }}"

    other, functiongemma = (
        ChatTemplate(f"{{# {tag} #}}{named}", {}).render(chat)
        for tag in ("<tool_response>", "<start_function_response>")
    )

    assert other == "  g  None"
    assert functiongemma == " f g  None"


def test_parts_are_joined_by_the_template_unless_the_content_has_been_changed() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for part in m.content %}"
        "[{{ part.text or part }}]{% endfor %}{% endfor %}{{ tools }}",
        {},
    )
    parts, changed = (
        ChatPrompt(messages=(ChatMessage(role="user", content=content, part_chars=(2, 1)),))
        for content in ("a\n\nb", "abcd")
    )

    assert template.render(parts) == "[a\n][b]None"
    assert template.render(changed) == "[a][b][c][d]None"


def test_whitespace_that_the_template_trims_is_trimmed_from_a_continued_message() -> None:
    asked = msgspec.structs.replace(
        prompt([("user", "Count."), ("assistant", " One, \n")]), continue_final_message=True
    )

    kept, trimmed = (
        ChatTemplate(f"{{% for m in messages %}}{{{{ m.content{suffix} }}}};{{% endfor %}}", {})
        for suffix in ("", " | trim")
    )

    assert kept.render(asked) == "Count.; One, \n"
    assert trimmed.render(asked) == "Count.;One,"


HARMONY_STYLE = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
    "{{ raise_exception('both') }}{% endif %}"
    "<|channel|>analysis<|message|>{{ m.thinking or m.content }}{% endfor %}{{ reasoning_effort }}"
)


def test_harmony_is_given_what_was_said_before_a_call_as_a_thought() -> None:
    call = ToolCall(id="c1", name="f", arguments="{}")
    said = ChatMessage(
        role="assistant", content="I look.", reasoning_content="Hm.", tool_calls=(call,)
    )
    chat = ChatPrompt(messages=(said,), template_kwargs={"reasoning_effort": "high"})

    template = ChatTemplate(HARMONY_STYLE + "{{ tools }}", {})

    assert template.render(chat) == "<|channel|>analysis<|message|>Hm.\nI look.highNone"


def test_a_developer_speaks_as_the_system_to_a_model_that_knows_no_developers() -> None:
    source = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    template = ChatTemplate(source, {})
    said = (
        ChatMessage(role="system", content="Be kind."),
        ChatMessage(role="developer", content="Be brief."),
        ChatMessage(role="user", content="Hi"),
        ChatMessage(role="developer", content="In French."),
    )

    text = template.render(ChatPrompt(messages=said))

    assert text == "[system: Be kind.\n\nBe brief.][user: Hi][system: In French.]"


def test_a_developer_is_left_to_a_template_that_knows_the_role() -> None:
    template = ChatTemplate("{{ messages[0].role == 'developer' }}", {})

    assert template.render(ChatPrompt(messages=(ChatMessage(role="developer"),))) == "True"


def test_a_message_has_its_name() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.name is defined }},{% endfor %}", {})

    messages = ChatMessage(role="user", name="ada"), ChatMessage(role="user", content="x")
    text = template.render(ChatPrompt(messages=messages))

    assert text == "True,False,"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate"),
        ("{{ messages[0].content + 1 }}", "rejects"),
        ("{{ messages[7].content.missing }}", "rejects"),
        ("{{ messages.append(1) }}", "rejects"),
        ("{{ messages.__class__.__mro__ }}", "rejects"),
    ],
    ids=["raised by the template", "wrong type", "missing", "mutation", "escape"],
)
def test_what_a_template_cannot_render_is_the_requests_fault(source: str, reason: str) -> None:
    template = ChatTemplate(source, {})

    with pytest.raises(InvalidRequest, match=reason) as error:
        template.render(prompt([("user", "secret")]))

    assert error.value.param == "messages"


def test_rendering_stops_at_the_bound() -> None:
    source = "{% for _ in range(9) %}twelve chars{% endfor %}{{ raise_exception('the end') }}"
    prompt = ChatPrompt(messages=(ChatMessage(role="user"),))

    with pytest.raises(ContextLengthExceeded):
        ChatTemplate(source, {}).render(prompt, max_chars=24)


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


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('false') }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ ('{0.__class__.__init__.__globals__}').format(cycler) }}",
        "{% set _ = messages.append(1) %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_reaches_nothing_but_its_variables(template: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(template, {}).render(prompt(CHATS[0]))


@pytest.mark.parametrize(
    ("source", "tells_time"),
    [
        ("{{ messages }}", False),
        ("{% set day = strftime_now('%d %b %Y') %}{{ day }}", False),
        ("{% if strftime_now is defined %}{{ strftime_now('%-d %B, 100%%') }}{% endif %}", False),
        ("{{ strftime_now('%Y') }}{{ strftime_now('%H:%M') }}", True),
        ("{{ strftime_now('%c') }}", True),
        ("{{ strftime_now(date_format) }}", True),
        ("{% set now = strftime_now %}{{ now('%Y') }}", True),
    ],
)
def test_a_template_tells_more_than_the_date_unless_all_its_formats_are_of_dates(
    source: str, tells_time: bool
) -> None:
    assert ChatTemplate(source, {}).tells_time == tells_time


def test_a_template_for_tools_may_tell_the_time() -> None:
    template = ChatTemplate("plain", {}, tool_source="{{ strftime_now('%M') }}")

    assert template.tells_time

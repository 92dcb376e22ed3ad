"""What a model may write as calls, in the form of its family: a table with a row for each
family."""

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from gateway.api.bodies.argument_grammars import (
    Arguments,
    LiteralArguments,
    TaggedArguments,
    json_arguments,
    whole_call,
)
from gateway.api.bodies.grammars import (
    BLANK,
    HARMONY_RULES,
    Budget,
    Rules,
    any_text_with,
    entry,
    quoted,
    until,
)
from gateway.text.tools.gemma import FUNCTIONGEMMA, GEMMA4, GemmaTokens
from gateway.text.tools.harmony import HARMONY
from shared.grammars import CALL_CAPTURE
from shared.messages import Constraint, Tool

MAX_CALLS = 16
"""Maximum number of calls in an answer. OpenAI and vLLM have no limit, and a small model may repeat
calls until it reaches its token limit (vllm#50399). No request is known to need so many."""
_MORE = f"{{0,{MAX_CALLS - 1}}}"


class Form(NamedTuple):
    """The form in which a family writes calls. In ``calls``, NAME stands for a function's name, and
    ARGUMENTS for the rule of its arguments."""

    inside: str
    """The text after the tag: a ``call``, after which MORE stands for further calls, if there may
    be some."""
    calls: Mapping[str, str]
    """The rules of a call, with an alternative for each function: the text that its parser needs,
    because an answer may end right after a repeated call. Its tags are left out if they mean
    nothing to the parser by then."""
    more: str = ""
    """The form of each further call."""
    tag: str = ""
    """The opening tag; empty if there is none."""
    between: str | None = None
    """The text between a call and the next tag; None: a single tag precedes all calls."""
    entries: Rules = MappingProxyType({})
    """Further tags."""
    arguments: Arguments = json_arguments
    after: str = ""
    """What a model may write at the end of its answer, to wait for the results of its calls."""
    has_tag_if_required: bool = True
    """Whether calls begin with the tag even if the model has to call."""
    has_other_tokens: bool = False
    """Whether further special tokens, which match no text, may stand around calls."""


def _entries(**texts: str) -> Rules:
    return {rule: text for name in texts for rule, text in entry(name, texts[name]).items()}


_OBJECT = {"call": r'"{\"name\":" " "? "\"NAME\"," " "? "\"arguments\":" " "? ARGUMENTS "}"'}
"""A call as a JSON object."""


_GEMMA_KEY = re.compile(r"[^\s:,{}\[\]<>]+")


def _gemma(tokens: GemmaTokens) -> Form:
    literals = {
        "string": "entry_quote string_rest",
        "boolean": '"true" | "false"',
        "null": '"null" | "None"',
        "key": f"/{_GEMMA_KEY.pattern}/ | string",
        **until("string_rest", "quote", tokens.quote),
    }
    return Form(
        "call entry_end",
        {"call": 'blank? "call:NAME{" ARGUMENTS "}"'},
        tag=tokens.opening,
        between="",
        entries=_entries(end=tokens.closing, response=tokens.response),
        arguments=LiteralArguments(
            '":"',
            '","',
            literals,
            lambda text: f"entry_quote {quoted(text)} entry_quote",
            key=_GEMMA_KEY,
            is_sorted=True,
        ),
        after="entry_response",
    )


_PYTHON: Rules = {
    "string": r"""/"([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*'/""",
    "boolean": '"True" | "False"',
    "null": '"None"',
    "key": "string",
}
FORMS: Mapping[str, Form] = {
    "deepseek_v3": Form(
        "one MORE blank? entry_close",
        {
            # V3 and R1 write the type and a code block, V3.1 only the name.
            "call": '"function" entry_sep "NAME\\n```json\\n" ARGUMENTS "\\n```"'
            ' | "NAME" entry_sep ARGUMENTS'
        },
        more="blank? one",
        tag="<｜tool▁calls▁begin｜>",
        entries={
            **_entries(
                begin="<｜tool▁call▁begin｜>",
                sep="<｜tool▁sep｜>",
                end="<｜tool▁call▁end｜>",
                close="<｜tool▁calls▁end｜>",
            ),
            "one": "entry_begin call entry_end",
        },
    ),
    "functiongemma": _gemma(FUNCTIONGEMMA),
    "gemma4": _gemma(GEMMA4),
    "glm45": Form(
        "blank? call",
        {"call": '"NAME" blank? ARGUMENTS entry_end'},
        tag="<tool_call>",
        between='"\\n"',
        entries=_entries(end="</tool_call>"),
        arguments=TaggedArguments(
            "entry_key",
            "key_end",
            "</arg_value>",
            {
                **_entries(key="<arg_key>", key_close="</arg_key>", value="<arg_value>"),
                "key_end": "entry_key_close blank? entry_value",
            },
        ),
    ),
    # gpt-oss ends its answer after a call.
    HARMONY: Form(
        "begin call",
        {
            "call": 'entry_channel "commentary to=functions.NAME" " "? entry_constrain "json" '
            "entry_message ARGUMENTS"
        },
        between="entry_call",
        entries={**HARMONY_RULES, **_entries(call="<|call|>")},
    ),
    "hermes": Form(
        "blank? call blank? entry_end",
        _OBJECT,
        tag="<tool_call>",
        between='"\\n"',
        entries=_entries(end="</tool_call>"),
    ),
    "kimi_k2": Form(
        "one MORE entry_close",
        {"call": '"functions.NAME:" /[0-9]+/ entry_arguments ARGUMENTS'},
        more="one",
        tag="<|tool_calls_section_begin|>",
        entries={
            **_entries(
                begin="<|tool_call_begin|>",
                arguments="<|tool_call_argument_begin|>",
                end="<|tool_call_end|>",
                close="<|tool_calls_section_end|>",
            ),
            "one": "entry_begin call entry_end",
        },
    ),
    # The format of an answer may be an object, too.
    "llama3_json": Form(
        "call", {"call": "ARGUMENTS"}, between='"; "', arguments=whole_call("parameters")
    ),
    "mistral": Form(
        '"[" call MORE "]" | named',
        {
            **_OBJECT,
            # Newer models write no list.
            "named": '"NAME" (entry_id /[A-Za-z0-9]+/)? entry_arguments? ARGUMENTS',
        },
        more='", " call',
        tag="[TOOL_CALLS]",
        between="",
        entries=_entries(id="[CALL_ID]", arguments="[ARGS]"),
        has_tag_if_required=False,
        has_other_tokens=True,  # those of a thought
    ),
    "pythonic": Form(
        '"[" call MORE "]"',
        {"call": '"NAME(" ARGUMENTS ")"'},
        more="/, ?/ call",
        arguments=LiteralArguments('"="', "/, ?/", _PYTHON, lambda text: quoted(quoted(text))),
    ),
    "qwen3_coder": Form(
        "blank? call",
        {"call": '"<function=NAME>" blank? ARGUMENTS entry_function_end blank? entry_end'},
        tag="<tool_call>",
        between='"\\n"',
        entries=_entries(function_end="</function>", end="</tool_call>"),
        arguments=TaggedArguments('"<parameter="', '">"', "</parameter>"),
    ),
}
"""The form of each parser's calls, by its name in `TOOL_PARSERS`."""


def calls(
    parser: str, tools: Collection[Tool], *, is_single: bool, is_required: bool = False
) -> Rules:
    """The rules of ``calls``: one call or several, `MAX_CALLS` at most, of ``tools``. Raises
    `GrammarTooLong`."""
    form = FORMS[parser]
    has_tag = bool(form.tag) and (form.has_tag_if_required or not is_required)
    one = "entry_tag inside" if has_tag else "inside"
    is_repeated = form.between is not None and has_tag is bool(form.tag)
    if is_repeated and not is_single:
        one = f"{one} ({form.between} {one}){_MORE}"
    tag = entry("tag", form.tag) if has_tag else {}
    return {"calls": one, **tag, **_inside(form, tools, is_single=is_single)}


def text_with_calls(
    parser: str, tools: Collection[Tool], reasoning_parser: str | None, *, is_single: bool
) -> Constraint | None:
    """Any text in which a call of these tools follows the opening tag of a call. None if calls have
    no such tag, or the text may have special tokens of its own. Raises `GrammarTooLong`."""
    form = FORMS[parser]
    if not form.tag or form.has_other_tokens:
        return None
    inside = _inside(form, tools, is_single=is_single)
    return any_text_with(inside, form.tag, reasoning_parser, after=form.after, is_single=is_single)


def _inside(form: Form, tools: Collection[Tool], *, is_single: bool) -> Rules:
    """The rules of ``inside``, which follows the tag."""
    more = f"({form.more}){_MORE}" if form.more and not is_single else ""
    rules = {"inside": form.inside.replace("MORE", more), **form.entries, **BLANK}
    for name in form.calls:
        alternatives = " | ".join(f"{name}_{k}" for k in range(len(tools)))
        rules[f'{name}[capture="{CALL_CAPTURE}"]'] = alternatives
    budget = Budget()
    for k, tool in enumerate(tools):
        for name, call in form.calls.items():
            call = call.replace("ARGUMENTS", f"a{k}")
            rules[f"{name}_{k}"] = call.replace("NAME", tool.name)
        rules |= form.arguments(f"a{k}", tool, budget)
    return rules

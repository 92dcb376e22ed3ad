"""What a model may write as calls, in its format of tool calls."""

from collections.abc import Collection

from gateway.api.bodies.grammars import any_text_with
from gateway.tool_formats.rules import BLANK, Budget, Rules, entry
from gateway.tool_formats.tool_format import ToolFormat
from shared.grammars import CALL_CAPTURE
from shared.messages import Constraint, Tool

MAX_CALLS = 16
"""Maximum number of calls in an answer. OpenAI and vLLM have no limit, and a small model may repeat
calls until it reaches its token limit (vllm#50399). No request is known to need so many."""
_MORE = f"{{0,{MAX_CALLS - 1}}}"


def calls(
    form: ToolFormat, tools: Collection[Tool], *, is_single: bool, is_required: bool = False
) -> Rules:
    """The rules of ``calls``: one call or several, `MAX_CALLS` at most, of ``tools``. Raises
    `GrammarTooLong`."""
    has_tag = bool(form.tag) and not (is_required and form.untagged_parser)
    one = "entry_tag inside" if has_tag else "inside"
    is_repeated = form.between is not None and has_tag is bool(form.tag)
    if is_repeated and not is_single:
        one = f"{one} ({form.between} {one}){_MORE}"
    tag = entry("tag", form.tag) if has_tag else {}
    return {"calls": one, **tag, **_inside(form, tools, is_single=is_single)}


def text_with_calls(
    form: ToolFormat, tools: Collection[Tool], reasoning_parser: str | None, *, is_single: bool
) -> Constraint | None:
    """Any text in which a call of these tools follows the opening tag of a call. None if calls have
    no such tag, or the text may have special tokens of its own. Raises `GrammarTooLong`."""
    if not form.tag or form.has_other_tokens:
        return None
    inside = _inside(form, tools, is_single=is_single)
    return any_text_with(inside, form.tag, reasoning_parser, after=form.after, is_single=is_single)


def _inside(form: ToolFormat, tools: Collection[Tool], *, is_single: bool) -> Rules:
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

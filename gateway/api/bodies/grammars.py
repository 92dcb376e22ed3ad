"""Grammars of whole answers, with the thoughts before them."""

import msgspec

from gateway.text.reasoning import HARMONY, THOUGHTS, Thought
from gateway.tool_formats.harmony import HARMONY_RULES
from gateway.tool_formats.rules import Rules, entry, json_rule, pattern, quoted, until
from shared.grammars import ENTRY_RULE
from shared.messages import Constraint


def rule_of(constraint: Constraint) -> str:
    """The rule for a constraint in a grammar."""
    match constraint.kind:
        case "json_schema":
            return json_rule(msgspec.json.decode(constraint.source))
        case "regex":
            return f"/{_escaped(constraint.source)}/"
        case "lark":
            return f"%lark {{\n{constraint.source}\n}}"


def grammar(rules: Rules) -> Constraint:
    lines = (f"{name}: {definition}" for name, definition in rules.items())
    return Constraint(kind="lark", source="\n".join(lines))


def text_rules(constraint: Constraint, reasoning_parser: str | None) -> Rules:
    """The rules of ``said``: a text within a constraint, as a model writes it."""
    if reasoning_parser != HARMONY:
        return {"said": rule_of(constraint)}
    return {
        "said": 'begin entry_channel "final" (" "? entry_constrain "json")? entry_message text',
        "text": rule_of(constraint),
        **HARMONY_RULES,
    }


def after_thought(rules: Rules, reasoning_parser: str | None) -> Constraint:
    """The grammar of the rule ``answer``, after a thought if there is any."""
    if reasoning_parser is None:
        return grammar({"start": "answer", **rules})
    thought = THOUGHTS[reasoning_parser]
    start = "thought space answer"
    if not thought.is_open:
        start = f"({_opening(thought)} thought space)? answer"
    return grammar({"start": start, **rules, **_thought(thought), "space": r"/\s*/"})


def after_reasoning(constraint: Constraint, reasoning_parser: str | None) -> Constraint:
    """The same, for the answer after the thought. A grammar of the client is for the whole text of
    the model, including its thought."""
    if reasoning_parser is None or constraint.kind == "lark":
        return constraint
    return after_thought(
        {"answer": "said", **text_rules(constraint, reasoning_parser)}, reasoning_parser
    )


def any_text_with(
    inside: Rules, tag: str, reasoning_parser: str | None, *, after: str, is_single: bool
) -> Constraint:
    """The grammar of any text in which the rule ``inside`` follows each ``tag``; in a thought the
    tag means nothing. A single tag ends the text, and the rule ``after`` may end it."""
    ending = f" {after}?" if after else ""
    rest = ending if is_single else " answer"
    rules = {
        "answer": f"opened inside{rest} | anything{ending}",
        **inside,
        **until("opened", "tag", tag),
    }
    if reasoning_parser is None:
        return grammar({"start": "answer", **rules})
    thought = THOUGHTS[reasoning_parser]
    rules |= _thought(thought)
    if thought.is_open:
        return grammar({"start": "thought answer | anything", **rules})
    # The longest lexeme wins: without a thought, no lexeme may begin like a thought.
    begun = f"\\s*{pattern(thought.opening + thought.label)}"
    return grammar(
        {
            "start": "thinking (thought answer | anything) | unthinking",
            "thinking": f"/\\s*/ {_opening(thought)} | /{begun}/",
            "unthinking": f"first inside{rest} | plain{ending}",
            "first": f"first_spelled | plain {ENTRY_RULE}tag",
            "first_spelled[lazy]": "FIRST_SPELLED",
            "plain": "PLAIN",
            "FIRST_SPELLED": f"/(?s:.*){pattern(tag)}/ & ~/{begun}(?s:.*)/",
            "PLAIN": f"/(?s:.*)/ & ~/{begun}(?s:.*)/",
            **rules,
        }
    )


def _opening(thought: Thought) -> str:
    label = quoted(thought.label) if thought.label else ""
    label_end = f"{ENTRY_RULE}label_end" if thought.label_end else ""
    return f"{ENTRY_RULE}thought {label} {label_end}".rstrip()


def _thought(thought: Thought) -> Rules:
    """The rules of a thought, from its opening tag on."""
    opening = {} if thought.is_open else entry("thought", thought.opening)
    label_end = entry("label_end", thought.label_end) if thought.label_end else {}
    return {**opening, **label_end, **until("thought", "thought_end", thought.closing)}


def _escaped(source: str) -> str:
    """A regular expression as it stands between slashes."""
    escaped, is_escape = [], False
    for char in source:
        if is_escape or char not in "/\n":
            escaped.append(char)
        else:
            escaped.append("\\/" if char == "/" else "\\n")
        is_escape = char == "\\" and not is_escape
    return "".join(escaped)

"""The tables of the fields of messages."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect as types

from infra.asyncapi import docstring, field_docs, tag
from shared import messages

_GROUPS: Sequence[tuple[str, str, Sequence[type[msgspec.Struct]]]] = (
    (
        "Jobs",
        "A program publishes jobs to `warren.jobs`.",
        (
            messages.GenerationJob,
            messages.ChatPrompt,
            messages.ChatMessage,
            messages.Tool,
            messages.ToolCall,
            messages.TextPrompt,
            messages.TokenPrompt,
            messages.SamplingParams,
            messages.Constraint,
            messages.Hedge,
        ),
    ),
    (
        "Quick jobs",
        "Jobs with the routing key `<model>.quick`, which do not queue behind generations. Each is "
        "answered with one message.",
        (messages.TokenizeJob, messages.DetokenizeJob, messages.EmbeddingJob),
    ),
    (
        "Answers and events",
        "Workers publish them to the job's `reply_to`.",
        (
            messages.Completed,
            messages.Choice,
            messages.Failed,
            messages.Started,
            messages.Provenance,
            messages.PromptFacts,
            messages.PromptScores,
            messages.TokenDelta,
            messages.Finished,
            messages.HandedOver,
            messages.TokenLogprobs,
            messages.Logprob,
            messages.Tokenized,
            messages.Detokenized,
            messages.Embedded,
        ),
    ),
    (
        "Receipts",
        "A gateway signs a receipt as canonical JSON; no queue contains it.",
        (
            messages.Receipt,
            messages.ReceiptChoice,
            messages.ReceiptUsage,
            messages.ReceiptRun,
        ),
    ),
    (
        "Commands",
        "The reader of a log sends commands to the worker, always in MessagePack.",
        (
            messages.Continue,
            messages.Progress,
            messages.Replaced,
            messages.Cancel,
            messages.Drain,
            messages.Declare,
        ),
    ),
    (
        "Announcements",
        "Workers publish them to `warren.workers` and to groups, always in MessagePack.",
        (messages.Announcement, messages.ReasoningSwitch),
    ),
    (
        "Between Warren's own processes",
        "Gateways and workers exchange them with one another, always in MessagePack.",
        (
            messages.Accepted,
            messages.Restored,
            messages.Release,
            messages.Withheld,
            messages.Follow,
            messages.StopWork,
            messages.LimitedTenants,
            messages.AdmissionRequest,
            messages.AdmissionAnswer,
            messages.UsageReport,
            messages.KeyUsage,
            messages.DetachedJob,
            messages.LeftJob,
            messages.Ended,
            messages.UsageRecord,
        ),
    ),
)
_LIKE_A_DELTA = (messages.PromptScores, messages.Finished, messages.Failed)
_LIKE_A_JOB = ("request_id", "model", "deadline", "created_at", "key_id", "trace", "version")
"""Fields that have the same meaning in all messages."""
_HEAD = ["| Field | Type | Default | Meaning |", "|---|---|---|---|"]
_OTHERS = {types.BoolType: "boolean", types.NoneType: "null", types.AnyType: "any value"}
_END = r"\Z"
_NONE = re.compile(r"\bNone\b")
_HUGE = 1 << 31
"""Bounds from here on only say how an integer is encoded."""


def message_tables() -> str:
    """The fields of all messages, as Markdown tables."""
    return "\n\n".join(
        "\n\n".join([f"## {title}\n\n{text}", *map(_section, structs)])
        for title, text, structs in _GROUPS
    )


def _section(struct: type[msgspec.Struct]) -> str:
    paragraphs = [f"### {struct.__name__}", _markdown(docstring(struct))]
    if struct.__struct_config__.array_like:
        paragraphs.append("An array of these values, in this order.")
    elif name := tag(struct):
        paragraphs.append(f"The field `type` is `{name}`.")
    described = types.type_info(struct)
    assert isinstance(described, types.StructType)
    docs = _shared_docs(struct) | field_docs(struct)
    rows = [_row(field, docs.get(field.name, "")) for field in described.fields]
    return "\n\n".join([*paragraphs, "\n".join([*_HEAD, *rows])])


def _shared_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The descriptions of the fields that this struct shares with other structs."""
    of_job = field_docs(messages.GenerationJob)
    of_delta = field_docs(messages.TokenDelta) if struct in _LIKE_A_DELTA else {}
    return {name: of_job[name] for name in _LIKE_A_JOB} | of_delta


def _row(field: types.Field, doc: str) -> str:
    cells = (f"`{field.encode_name}`", _type(field.type), _default(field), _markdown(doc))
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _default(field: types.Field) -> str:
    if field.required:
        return "required"
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if isinstance(default, msgspec.Struct):
        return "its defaults"
    return f"`{msgspec.json.encode(default).decode()}`"


def _type(described: types.Type) -> str:
    match described:
        case types.StructType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case types.UnionType(types=members):
            return " or ".join(map(_type, members))
        case types.LiteralType(values=values):
            return " or ".join(f'`"{value}"`' for value in values)
        case types.VarTupleType(item_type=item):
            return f"list{_length(described)} of {_item(item)}"
        case types.TupleType(item_types=items):
            return f"array of {' and '.join(map(_type, items))}"
        case types.DictType(key_type=key, value_type=value):
            return f"map{_length(described)} of {_type(key)} to {_item(value)}"
        case _:
            return _scalar(described)


def _item(described: types.Type) -> str:
    words = _type(described)
    return f"({words})" if isinstance(described, types.UnionType) else words


def _scalar(described: types.Type) -> str:
    match described:
        case types.IntType(ge=least, le=most, lt=bound):
            return f"integer{_range(least, bound - 1 if bound is not None else most)}"
        case types.FloatType(ge=least, gt=above, le=most):
            return f"number{_range(least, most, above)}"
        case types.StrType(pattern=str(pattern)):
            return f"string like `{pattern.removeprefix('^').removesuffix(_END)}`"
        case types.StrType():
            return f"string{_length(described, 'characters')}"
        case types.BytesType():
            return f"bytes{_length(described, 'bytes')}"
        case _:
            return _OTHERS[type(described)]


def _range(least: Any, most: Any, above: Any = None) -> str:
    if most is not None and most >= _HUGE - 1:
        most = None
        least = None if least < -_HUGE else least
    bounds = [
        f"{sign} {bound:g}"
        for sign, bound in (("≥", least), (">", above), ("≤", most))
        if bound is not None
    ]
    return f" {', '.join(bounds)}" if bounds else ""


def _length(described: Any, unit: str = "") -> str:
    most = described.max_length
    return "" if most is None else f" (up to {most:,}{f' {unit}' if unit else ''})"


def _markdown(doc: str) -> str:
    text = " ".join(doc.replace("``", "`").split())
    return _NONE.sub("`null`", text)

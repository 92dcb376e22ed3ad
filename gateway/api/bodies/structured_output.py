"""Constraints on an answer: taken from the body, and checked before anything is queued.

A check compiles the constraint in a separate process, with the worker's limits (`shared.grammars`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Struct

from gateway.api.bodies.parsing import check_json, refused
from shared.errors import InvalidRequest
from shared.grammars import TRIALS, is_gbnf
from shared.messages import MAX_GRAMMAR_CHARS, Constraint

_MAX_ALTERNATIVES = 1024
_MAX_REASON_CHARS = 500
_MAX_SHOWN_CHARS = 64
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
PARAMETERS = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in _KINDS))
"""The parameters of bodies that ask for a constraint."""


class NamedSchema(Struct, frozen=True):
    schema: Any = None


class TextFormat(Struct, frozen=True, kw_only=True):
    """The format of a response's text."""

    schema_param: ClassVar[str] = "text.format.schema"
    """The parameter that is missing if there is no schema."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Any = None
    """A JSON schema: an object, or text."""

    def wanted_schema(self) -> tuple[Any, str]:
        """The schema, and the parameter that has it."""
        return self.schema, "text.format.schema"


class ResponseFormat(TextFormat, frozen=True, kw_only=True):
    """The format of a chat's answer."""

    schema_param: ClassVar[str] = "response_format.json_schema"

    json_schema: NamedSchema | None = None

    def wanted_schema(self) -> tuple[Any, str]:
        if self.json_schema is None:
            return self.schema, "response_format.schema"
        return self.json_schema.schema, "response_format.json_schema.schema"


class RequestedConstraint(NamedTuple):
    """A constraint, and the parameter that asks for it."""

    param: str
    constraint: Constraint
    parts: tuple["RequestedConstraint", ...] = ()
    """The constraints that it combines, as far as the client named them separately."""
    drop_part: Callable[[str], "RequestedConstraint | None"] | None = None
    """For an optional constraint: returns it without the part at this parameter, which no worker
    can compile, or None if nothing is left."""
    with_lark: Callable[[Constraint], "RequestedConstraint"] | None = None
    """For a grammar of llama.cpp, which ``constraint`` is until it is translated: returns the same
    request with the translated grammar."""

    def of(self, constraint: Constraint) -> "RequestedConstraint":
        """The same parameter with another constraint, which is ready for workers."""
        return RequestedConstraint(self.param, constraint)


def wanted_constraint(fields: Mapping[str, Any]) -> RequestedConstraint | None:
    """The constraint that a body's ``response_format``, ``structured_outputs`` or ``guided_*`` ask
    for. Raises `InvalidRequest`."""
    found = list(_all_wanted(fields))
    # Some clients send the same grammar under its older and its newer name.
    for other in found[1:]:
        if other.constraint != found[0].constraint:
            raise refused(other.param, f"not together with {found[0].param}.")
    return found[0] if found else None


def json_constraint(schema: Any, param: str) -> Constraint:
    """The constraint of a schema, which may also be given as JSON text. Raises `InvalidRequest`."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise refused(param, f"not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise refused(param, "expected a JSON schema.")
    check_json(schema, param)
    return _constraint("json_schema", msgspec.json.encode(schema).decode(), param)


async def translated(wanted: RequestedConstraint, tenant: str) -> RequestedConstraint:
    """The same constraint. A grammar of llama.cpp is translated. Raises `InvalidRequest` and
    `Overloaded`."""
    if wanted.with_lark is None:
        return wanted
    try:
        lark = await TRIALS.translate(wanted.constraint.source, tenant)
    except ValueError as error:
        raise _unusable(wanted.param, str(error)) from None
    return wanted.with_lark(_constraint("lark", lark, wanted.param))


def translated_now(wanted: RequestedConstraint) -> RequestedConstraint:
    """The same for callers outside an event loop; it blocks. Raises `InvalidRequest`."""
    if wanted.with_lark is None:
        return wanted
    try:
        lark = TRIALS.translate_now(wanted.constraint.source)
    except ValueError as error:
        raise _unusable(wanted.param, str(error)) from None
    return wanted.with_lark(_constraint("lark", lark, wanted.param))


async def check(wanted: RequestedConstraint, tenant: str) -> None:
    """Raise `InvalidRequest` if no worker could obey; the error names the part if a single part is
    at fault. Also raises `Overloaded`."""
    problem = await TRIALS.problem(wanted.constraint, tenant)
    for part in wanted.parts if problem else ():
        await check(part, tenant)
    _require(wanted, problem)


def check_now(wanted: RequestedConstraint) -> None:
    """The same for callers outside an event loop; it blocks. Raises `InvalidRequest`."""
    problem = TRIALS.problem_now(wanted.constraint)
    for part in wanted.parts if problem else ():
        check_now(part)
    _require(wanted, problem)


def _require(wanted: RequestedConstraint, problem: str) -> None:
    if problem:
        raise _unusable(wanted.param, problem)


def _unusable(param: str, problem: str) -> InvalidRequest:
    # A problem quotes the constraint.
    return InvalidRequest(f"{param}: {problem[:_MAX_REASON_CHARS]}", param=param)


def _all_wanted(fields: Mapping[str, Any]) -> Iterator[RequestedConstraint]:
    if response_format := fields.get("response_format"):
        yield from _from_response_format(response_format)
    if outputs := fields.get("structured_outputs"):
        for kind, value in outputs.items():
            param = f"structured_outputs.{kind[:_MAX_SHOWN_CHARS]}"  # the client's own
            if kind in _KINDS:
                yield from _of_kind(kind, value, param)
            elif value and not kind.startswith("disable_"):
                raise InvalidRequest(f"{param} is not supported.", param=param)
    for kind in _KINDS:
        yield from _of_kind(kind, fields.get(f"guided_{kind}"), f"guided_{kind}")


def _from_response_format(wanted: TextFormat) -> Iterator[RequestedConstraint]:
    if wanted.type == "text":
        return
    schema, param = wanted.wanted_schema()
    if wanted.type == "json_schema" and schema is None:
        raise refused(wanted.schema_param, "expected a schema.")
    yield RequestedConstraint(param, json_constraint(schema or {"type": "object"}, param))


def _of_kind(kind: str, value: Any, param: str) -> Iterator[RequestedConstraint]:
    if value is None or value is False:
        return
    if kind == "json":
        yield RequestedConstraint(param, json_constraint(value, param))
    elif kind == "json_object":
        yield RequestedConstraint(param, json_constraint({"type": "object"}, param))
    elif kind == "choice":
        yield RequestedConstraint(param, _alternatives(value, param))
    elif not isinstance(value, str):
        raise refused(param, "expected a string.")
    elif kind == "regex":
        yield RequestedConstraint(param, _constraint("regex", value, param))
    else:
        wanted = RequestedConstraint(param, _constraint("lark", value, param))
        yield wanted._replace(with_lark=wanted.of) if is_gbnf(value) else wanted


def _alternatives(texts: Any, param: str) -> Constraint:
    if (
        not isinstance(texts, list)
        or not 0 < len(texts) <= _MAX_ALTERNATIVES
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise InvalidRequest(
            f"{param}: expected 1 to {_MAX_ALTERNATIVES} strings that are not empty.", param=param
        )
    quoted = (json.dumps(text, ensure_ascii=False) for text in texts)
    return _constraint("lark", "start: " + " | ".join(quoted), param)


def _constraint(kind: Any, source: str, param: str) -> Constraint:
    if len(source) > MAX_GRAMMAR_CHARS:
        raise refused(param, f"longer than {MAX_GRAMMAR_CHARS} characters.")
    return Constraint(kind=kind, source=source)

"""Parses the JSON body of a request into a struct."""

from collections.abc import Mapping
from functools import cache
from itertools import islice
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Struct

from gateway.api.bodies.parameters import read, refuse_unsupported
from shared.errors import InvalidRequest

_MAX_IGNORED = 16


class Body(Struct, frozen=True, kw_only=True):
    """The base of all bodies. Unknown parameters are tolerated."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Parameters that are not supported, with the neutral values of each."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Parameters that are refused because they have another name here, and that name."""

    @classmethod
    def check_names(cls, body: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for a parameter that is not supported."""
        refuse_unsupported(body, cls.neutral)


_Body = TypeVar("_Body", bound=Body)


def parse(kind: type[_Body], body: bytes) -> _Body:
    """Parse a JSON body. Raises `InvalidRequest`, also for unsupported parameters, and
    `ModelNotFound`."""
    return parse_with_ignored(kind, body)[0]


def parse_with_ignored(kind: type[_Body], body: bytes) -> tuple[_Body, tuple[str, ...]]:
    """As `parse`, with the names of the first parameters that are ignored because they are
    unknown."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(said, dict):
        raise InvalidRequest("body: expected an object")
    required = _required(kind)  # rejected if empty
    said = {name: value for name, value in said.items() if name in required or not is_unused(value)}
    request = read(said, kind)
    kind.check_names(said)
    known = _known(kind)
    unknown = (name for name in said if name not in known)
    return request, tuple(islice(unknown, _MAX_IGNORED))


def is_unused(value: Any) -> bool:
    """Whether a client library sent this value for a parameter that its user left out."""
    return value is None or value == {} or value == []


@cache
def _known(kind: type[Body]) -> frozenset[str]:
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    return frozenset(names | kind.neutral.keys())


@cache
def _required(kind: type[Body]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(kind) if field.required)

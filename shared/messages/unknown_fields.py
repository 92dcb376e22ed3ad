"""Finds the fields of a message that its type does not have. They are ignored, because they may
belong to a newer version; but they may also be misspelled."""

from collections.abc import Iterator
from functools import cache
from itertools import islice

import msgspec
from msgspec import Raw, Struct, inspect

from shared.printable import printable

_MAX_FIELDS = 16
_MAX_NAME_CHARS = 64
_NO_TEXT = "a name that is not UTF-8"


class _Tagged(Struct):
    """Decodes only the tag."""

    type: str


def unknown_fields(kind: type[Struct], body: bytes, *, is_json: bool) -> tuple[str, ...]:
    """The paths of the first fields in ``body``, a valid message of ``kind``, that it does not
    have, such as ``sampling.max_token``. Parts that may hold values of any kind are not
    searched."""
    paths: list[str] = []
    try:
        paths += islice(_search(Raw(body), _type_of(kind), is_json, ""), _MAX_FIELDS)
    except (msgspec.MsgspecError, ValueError):  # the decoder of the message does not look at it
        paths.append(_NO_TEXT)
    return tuple(map(printable, paths))


@cache
def _type_of(kind: type[Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _search(part: Raw, kind: inspect.Type, is_json: bool, path: str) -> Iterator[str]:
    """The unknown fields of ``part``, which is at ``path``."""
    decode = msgspec.json.decode if is_json else msgspec.msgpack.decode
    match kind:
        case inspect.StructType():
            known = {field.encode_name: field.type for field in kind.fields}
            for name, value in (decode(part, type=dict[str, Raw] | None) or {}).items():
                inner = f"{path}.{name[:_MAX_NAME_CHARS]}".removeprefix(".")
                if name in known:
                    yield from _search(value, known[name], is_json, inner)
                elif name != kind.tag_field:
                    yield inner
        case inspect.VarTupleType(
            item_type=inspect.StructType() | inspect.UnionType() as item_type
        ):
            for number, item in enumerate(decode(part, type=list[Raw])):
                yield from _search(item, item_type, is_json, f"{path}[{number}]")
        case inspect.UnionType():
            structs = [one for one in kind.types if isinstance(one, inspect.StructType)]
            if len(structs) > 1:
                tag = decode(part, type=_Tagged).type
                structs = [one for one in structs if one.tag == tag]
            for one in structs:
                yield from _search(part, one, is_json, path)

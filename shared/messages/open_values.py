"""Counts the values of parts that may hold any, before they are decoded."""

from collections.abc import Iterable

from shared.errors import UndecodableMessage

MAX_VALUES = 1 << 19
"""Names of members included. HTTP permits half as many values, whose names it does not count."""
MAX_CONTAINERS = 1 << 15

# By the first byte of a MessagePack value (https://github.com/msgpack/msgpack, spec.md): the bytes
# of its length field, if it has a length field, and the bytes that follow besides.
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_FLOATS = {0xCA: 4, 0xCB: 8}
_INTEGERS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_EXTENSIONS = {0xC7: 1, 0xC8: 1, 0xC9: 1, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_SIZES = _FLOATS | _INTEGERS | _EXTENSIONS
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


def check_open_values(parts: Iterable[bytes], *, is_json: bool) -> None:
    """Raises `UndecodableMessage` if the documents have too many values or containers in all, after
    a time that the limits bound."""
    num_values = num_containers = 0
    for part in parts:
        if is_json:
            # Brackets, commas and colons in strings are counted, too.
            num_containers += part.count(b"[") + part.count(b"{")
            num_values += part.count(b",") + part.count(b":") + num_containers
        else:
            num_values, num_containers = count_msgpack(part, num_values, num_containers)
        if num_values > MAX_VALUES or num_containers > MAX_CONTAINERS:
            raise UndecodableMessage(
                f"tools and template_kwargs have more than {MAX_VALUES} values or "
                f"{MAX_CONTAINERS} objects and arrays"
            )


def count_msgpack(data: bytes, num_values: int = 0, num_containers: int = 0) -> tuple[int, int]:
    """Both numbers, with those of a valid MessagePack value, as far as the limits."""
    position, num_expected = 0, 1
    while num_expected and num_values <= MAX_VALUES and num_containers <= MAX_CONTAINERS:
        first = data[position]
        position += 1
        num_expected -= 1
        num_values += 1
        if first < 0x80 or first >= 0xE0:  # small integers
            continue
        if first < 0x90:
            num_inner = 2 * (first & 0x0F)
        elif first < 0xA0:
            num_inner = first & 0x0F
        elif first < 0xC0:
            position += first & 0x1F
            continue
        elif first in _ARRAYS or first in _MAPS:
            end = position + (_ARRAYS.get(first) or _MAPS[first])
            num_inner = int.from_bytes(data[position:end], "big") * (2 if first in _MAPS else 1)
            position = end
        else:
            end = position + _LENGTHS.get(first, 0)
            position = end + int.from_bytes(data[position:end], "big") + _SIZES.get(first, 0)
            continue
        num_containers += 1
        num_expected += num_inner
    return num_values, num_containers

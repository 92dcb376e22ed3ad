"""Messages whose properties only a foreign publisher would write, as raw frames."""

import struct
from typing import Any, cast

import pytest
from aiormq.abc import DeliveredMessage
from pamqp import frame
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from shared.bus.base import Message
from shared.bus.rabbit.encoding import num_returns, to_message, to_properties

HEADERS, CORRELATION_ID, REPLY_TO, TIMESTAMP, APP_ID = 1 << 13, 1 << 10, 1 << 9, 1 << 6, 1 << 3
LATIN_1 = b"caf\xe9"
MICROSECONDS = struct.pack(">Q", 1_700_000_000_000_000)
DEPTH = 5000


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def long(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def header(name: bytes, tag: bytes, value: bytes) -> bytes:
    return short(name) + tag + value


def nested(tag: bytes) -> bytes:
    """A table or an array of one element that is of the same kind, and so on."""
    value = long(b"")
    for _ in range(DEPTH):
        value = long((short(b"a") if tag == b"F" else b"") + tag + value)
    return value


def delivered(flags: int, properties: bytes) -> DeliveredMessage:
    """What aiormq makes of a header frame with these properties."""
    payload = struct.pack(">HHQH", 60, 0, 0, flags) + properties
    raw = struct.pack(">BHI", 2, 1, len(payload)) + payload + b"\xce"
    _, _, decoded = frame.unmarshal(raw)
    assert isinstance(decoded, ContentHeader)
    return DeliveredMessage(Basic.Deliver(redelivered=True), decoded, b"", cast("Any", None))


@pytest.mark.parametrize(
    ("flag", "value"),
    [(CORRELATION_ID, short(LATIN_1)), (TIMESTAMP, MICROSECONDS), (APP_ID, short(LATIN_1))],
    ids=["correlation id", "timestamp", "app id"],
)
def test_a_property_that_cannot_be_decoded_does_not_end_the_connection(
    flag: int, value: bytes
) -> None:
    others = {REPLY_TO: short(b"reply.mine")} | {flag: value}
    in_order = b"".join(others[key] for key in sorted(others, reverse=True))

    message = to_message(delivered(REPLY_TO | flag, in_order))

    assert message.reply_to == "reply.mine"
    assert message.correlation_id == ("caf?" if flag == CORRELATION_ID else "")


@pytest.mark.parametrize(
    "strange",
    [
        header(LATIN_1, b"S", long(b"x")),
        header(b"at", b"T", MICROSECONDS),
        header(b"inner", b"F", long(header(LATIN_1, b"S", long(b"x")))),
        header(b"deep", b"F", nested(b"F")),
    ],
    ids=["name", "timestamp", "inner name", "depth"],
)
def test_headers_that_cannot_be_decoded_leave_the_others_alone(strange: bytes) -> None:
    table = long(strange + header(b"x-delivery-count", b"l", struct.pack(">q", 3)))

    message = delivered(HEADERS | REPLY_TO, table + short(b"reply.mine"))

    assert (num_returns(message), to_message(message).reply_to) == (3, "reply.mine")


def test_headers_behind_one_of_unknown_length_are_dropped() -> None:
    strange = header(b"deep", b"A", nested(b"A")) + header(b"lost", b"S", long(b"x"))
    table = long(header(b"kept", b"S", long(b"x")) + strange)

    message = to_message(delivered(HEADERS | REPLY_TO, table + short(b"reply.mine")))

    assert (message.headers, message.reply_to) == ({"kept": "x"}, "reply.mine")


def test_a_replaced_text_is_as_short_as_the_original() -> None:
    message = to_message(delivered(CORRELATION_ID, short(b"\xe9" * 255)))

    marshalled = to_properties(Message(b"", correlation_id=message.correlation_id), "me").marshal()

    assert short(b"?" * 255) in marshalled

"""Messages as AMQP's frames, including frames that only a foreign publisher would write."""

import struct
from dataclasses import dataclass
from typing import cast

import pytest
from aiormq import Channel
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from shared.bus.base import Binding, Exchange, Message
from shared.bus.rabbit.encoding import marshal_publish, message_id_of, to_message
from shared.bus.rabbit.frames import CONTENT_BODY, frame_parts

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
    """A table or an array with an element of the same kind, and so on."""
    value = long(b"")
    for _ in range(DEPTH):
        value = long((short(b"a") if tag == b"F" else b"") + tag + value)
    return value


def returned(flags: int, properties: bytes) -> tuple[Message, int]:
    """The message with these properties, and how often it was returned."""
    header_frame = struct.pack(">HHQH", 60, 0, 0, flags) + properties
    return to_message(header_frame, b"", is_redelivered=True)


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

    message, _ = returned(REPLY_TO | flag, in_order)

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

    message, num_returns = returned(HEADERS | REPLY_TO, table + short(b"reply.mine"))

    assert (num_returns, message.reply_to) == (3, "reply.mine")


def test_headers_behind_one_of_unknown_length_are_dropped() -> None:
    strange = header(b"deep", b"A", nested(b"A")) + header(b"lost", b"S", long(b"x"))
    table = long(header(b"kept", b"S", long(b"x")) + strange)

    message, _ = returned(HEADERS | REPLY_TO, table + short(b"reply.mine"))

    assert (message.headers, message.reply_to) == ({"kept": "x"}, "reply.mine")


def test_a_replaced_text_is_as_short_as_the_original() -> None:
    message, _ = returned(CORRELATION_ID, short(b"\xe9" * 255))

    assert message.correlation_id == "?" * 255


@dataclass
class SmallChannel:
    """What marshalling reads of a channel."""

    number: int = 7
    max_content_size: int = 2400


SHORT_TEXTS = st.text(max_size=60)
MESSAGES = st.builds(
    Message,
    st.binary(max_size=300).map(lambda piece: 20 * piece),
    content_type=st.sampled_from(["application/msgpack", "text/plain"]),
    correlation_id=SHORT_TEXTS,
    reply_to=SHORT_TEXTS,
    headers=st.dictionaries(SHORT_TEXTS, SHORT_TEXTS | st.integers(-(2**62), 2**62), max_size=3),
    message_id=SHORT_TEXTS,
    published_at=st.sampled_from([0.0, 1_700_000_000.0]),
)


def published(message: Message) -> bytes:
    """The frames that publish a message."""
    channel = cast("Channel", SmallChannel())
    binding = Binding(Exchange("events", "direct"), "to.me")
    return marshal_publish(channel, binding, message, "me")


@pytest.mark.parametrize("body", [b"", b"of any size"])
def test_a_broker_may_allow_frames_of_any_size(body: bytes) -> None:
    channel = cast("Channel", SmallChannel(max_content_size=-8))

    published = marshal_publish(
        channel, Binding(Exchange("events", "direct"), "me"), Message(body), ""
    )

    assert (b"".join(frame_parts(CONTENT_BODY, 7, body)) in published) == bool(body)


@given(MESSAGES)
def test_a_message_arrives_as_it_was_published(message: Message) -> None:
    rest = published(message)
    parts: list[object] = []
    headers = []
    while rest:
        size, number, part = frame.unmarshal(rest)
        assert number == SmallChannel.number
        if isinstance(part, ContentHeader):
            headers.append(rest[7 : size - 1])
        parts.append(part)
        rest = rest[size:]

    method, header, *bodies = parts
    assert isinstance(method, Basic.Publish)
    assert isinstance(header, ContentHeader)
    pieces = [cast("ContentBody", body).value for body in bodies]
    assert (method.exchange, method.routing_key, method.mandatory) == ("events", "to.me", True)
    assert header.body_size == len(message.body)
    assert header.properties.delivery_mode == 2
    assert max(map(len, pieces), default=0) <= SmallChannel.max_content_size
    arrived = to_message(headers[0], b"".join(pieces), is_redelivered=False)
    assert arrived == (replace(message, user_id="me"), 0)
    assert message_id_of(headers[0]) == message.message_id


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes must be in range"):
        published(Message(b"", correlation_id="x" * 256))

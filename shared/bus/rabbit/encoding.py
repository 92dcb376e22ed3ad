"""Conversion to and from AMQP: messages, queue declarations, and failures, which become the errors
of `shared.errors`."""

import asyncio
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache

from aiormq import Channel, Connection
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)
from pamqp import decode, encode
from pamqp.commands import Basic
from pamqp.common import FieldTable
from pamqp.header import ContentHeader

from shared.bus.base import Binding, Message, Queue
from shared.bus.rabbit.frames import CONTENT_BODY, CONTENT_HEADER, METHOD, frame_parts
from shared.errors import (
    AccessRefused,
    BusError,
    BusUnavailable,
    MessageTooLarge,
    QueueBusy,
    QueueDown,
    QueueNotFound,
    TooManyQueues,
    Unroutable,
)
from shared.messages import MSGPACK

_CONTENT = struct.Struct(">HHQ")
"""The beginning of a frame with properties: class, weight, and the size of the body."""
_SETTLEMENT = struct.Struct(">IQ?")
"""The payload of ``Basic.Ack`` and ``Basic.Reject``: the method, the delivery tag, and whether all
deliveries before are meant, or whether the delivery returns to its queue."""
_CONTENT_TYPE, _HEADERS, _DELIVERY_MODE = 1 << 15, 1 << 13, 1 << 12
_CORRELATION_ID, _REPLY_TO, _MESSAGE_ID = 1 << 10, 1 << 9, 1 << 7
_TIMESTAMP, _USER_ID = 1 << 6, 1 << 4
_PLAIN_IN_ORDER = (
    _CONTENT_TYPE, _HEADERS, _DELIVERY_MODE, _CORRELATION_ID, _REPLY_TO, _MESSAGE_ID, _USER_ID,
)  # fmt: skip
_PLAIN = sum(_PLAIN_IN_ORDER)
_NO_HEADERS = bytes(4)
_PERSISTENT = 2
_RETURNS_HEADER = "x-delivery-count"
"""Set by quorum queues: how often a message was returned."""
_DEATHS_HEADER = "x-death"
"""Set when a message is dead-lettered: a list of its deaths."""
_ABSENT = re.compile(r"\bno (queue|exchange|binding)\b")
"""How a broker describes what does not exist. The code is also that of a queue that it knows and
cannot use, because its node or its process is down, or its node is just leaving or returning."""
AMQP_FAILURES = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError)


def _short_string(value: bytes) -> tuple[int, str]:
    """Decode a short string. Bytes that are not UTF-8 become question marks, which take no more
    bytes."""
    try:
        return decode.short_str(value)
    except UnicodeDecodeError:
        end = 1 + value[0]
        return end, value[1:end].decode(errors="replace").replace("\ufffd", "?")


def _timestamp(value: bytes) -> tuple[int, datetime | None]:
    """Decode a timestamp; None if it is beyond the year 9999."""
    try:
        return decode.timestamp(value)
    except (OverflowError, OSError, ValueError):
        if len(value) < 8:
            raise
        return 8, None


def _field_table(value: bytes) -> tuple[int, FieldTable]:
    """Decode a table up to the first value that cannot be decoded."""
    end = 4 + int.from_bytes(value[:4])
    if end > len(value):
        raise ValueError(f"a table of {end} bytes, of which {len(value)} are there")
    table: FieldTable = {}
    offset = 4
    while offset < end:
        length, name = _short_string(value[offset:end])
        offset += length
        try:
            length, table[name] = decode.embedded_value(value[offset:end])
        except (ValueError, RecursionError):  # its length is unknown
            break
        offset += length
    return end, table


# A broker passes on properties that pamqp 4.0.1 cannot decode: text that is not UTF-8, times in
# microseconds, deeply nested tables. One such message would end the connection with all its
# deliveries, and so would each redelivery.
decode.METHODS |= {"shortstr": _short_string, "timestamp": _timestamp, "table": _field_table}
decode.TABLE_MAPPING |= {b"T": _timestamp, b"F": _field_table}


def marshal_publish(channel: Channel, binding: Binding, message: Message, user: str) -> bytes:
    """The frames of a mandatory publish by ``user`` on ``channel``. Raises ValueError, TypeError,
    OverflowError and `struct.error` if AMQP cannot express it."""
    number, body = channel.number, message.body
    header = _CONTENT.pack(Basic.frame_id, 0, len(body)) + _properties(message, user)
    # A broker may allow frames of any size, which aiormq takes for less than nothing.
    most = channel.max_content_size if channel.max_content_size > 0 else len(header + body)
    if len(header) > most:  # the broker would end the connection
        raise ValueError(f"the properties have {len(header)} bytes, of {most} in a frame")
    parts = [
        *frame_parts(METHOD, number, _publish_method(binding)),
        *frame_parts(CONTENT_HEADER, number, header),
    ]
    for start in range(0, len(body), most):
        parts += frame_parts(CONTENT_BODY, number, body[start : start + most])
    return b"".join(parts)


def marshal_ack(channel: Channel, tag: int) -> bytes:
    """The frame that acknowledges one delivery."""
    payload = _SETTLEMENT.pack(Basic.Ack.index, tag, False)
    return b"".join(frame_parts(METHOD, channel.number, payload))


def marshal_reject(channel: Channel, tag: int, *, requeue: bool) -> bytes:
    """The frame that rejects one delivery."""
    payload = _SETTLEMENT.pack(Basic.Reject.index, tag, requeue)
    return b"".join(frame_parts(METHOD, channel.number, payload))


def marshal_consume(channel: Channel, queue: str, tag: str, *, is_exclusive: bool) -> bytes:
    """The frame that starts the consumer ``tag``, which the broker does not answer."""
    consume = Basic.Consume(queue=queue, consumer_tag=tag, exclusive=is_exclusive, nowait=True)
    payload = struct.pack(">I", Basic.Consume.index) + consume.marshal()
    return b"".join(frame_parts(METHOD, channel.number, payload))


def marshal_cancel(channel: Channel, tag: str) -> bytes:
    """The frame that ends the consumer ``tag``, which the broker does not answer. What it has
    delivered remains to be settled."""
    cancel = Basic.Cancel(consumer_tag=tag, nowait=True)
    payload = struct.pack(">I", Basic.Cancel.index) + cancel.marshal()
    return b"".join(frame_parts(METHOD, channel.number, payload))


@lru_cache(maxsize=4096)
def _publish_method(binding: Binding) -> bytes:
    """The payload of the method frame, the same for all events of a log."""
    publish = Basic.Publish(
        exchange=binding.exchange.name, routing_key=binding.routing_key, mandatory=True
    )
    return struct.pack(">I", Basic.Publish.index) + publish.marshal()


def _properties(message: Message, user: str) -> bytes:
    """The properties of a message as pamqp encodes them, which does it by reflection."""
    flags = _HEADERS | _DELIVERY_MODE
    parts = [encode.field_table(dict(message.headers)), bytes((_PERSISTENT,))]
    if message.content_type:
        flags |= _CONTENT_TYPE
        parts.insert(0, _marshal_short(message.content_type))
    for flag, text in ((_CORRELATION_ID, message.correlation_id), (_REPLY_TO, message.reply_to)):
        if text:
            flags |= flag
            parts.append(_marshal_short(text))
    flags |= _MESSAGE_ID
    parts.append(_marshal_short(message.message_id))
    if message.published_at:
        flags |= _TIMESTAMP
        parts.append(struct.pack(">Q", int(message.published_at)))
    flags |= _USER_ID
    parts.append(_marshal_short(user))
    return flags.to_bytes(2) + b"".join(parts)


def _marshal_short(text: str) -> bytes:
    encoded = text.encode()
    return bytes((len(encoded),)) + encoded  # ValueError if it has more than 255 bytes


def to_message(header: bytes, body: bytes, *, is_redelivered: bool) -> tuple[Message, int]:
    """A delivered message, whose headers that are neither text nor numbers are dropped, and how
    often it was returned before: the count of quorum queues; for other queues 1 if it was
    redelivered, else 0.

    ``header`` is the payload of the frame with its properties. Raises ValueError and
    `struct.error`.
    """
    texts = _plain_texts(header)
    if texts is not None:
        message = Message(
            body,
            content_type=texts.get(_CONTENT_TYPE) or MSGPACK,
            correlation_id=texts.get(_CORRELATION_ID, ""),
            reply_to=texts.get(_REPLY_TO, ""),
            message_id=texts.get(_MESSAGE_ID, ""),
            user_id=texts.get(_USER_ID, ""),
        )
        return message, int(is_redelivered)
    properties = _decoded(header)
    headers = properties.headers or {}
    message = Message(
        body,
        content_type=properties.content_type or MSGPACK,
        correlation_id=properties.correlation_id or "",
        reply_to=properties.reply_to or "",
        headers={
            name: value
            for name, value in headers.items()
            if isinstance(value, str | int) and name != _RETURNS_HEADER
        },
        message_id=properties.message_id or "",
        user_id=properties.user_id or "",
        published_at=_unix_time(properties.timestamp),
        died_at=_first_death(headers),
    )
    # The header of a message that was never returned would be the publisher's own.
    return message, _num_returns(headers) if is_redelivered else 0


def message_id_of(header: bytes) -> str:
    """The message id in the payload of a frame with properties."""
    texts = _plain_texts(header)
    if texts is None:
        return _decoded(header).message_id or ""
    return texts.get(_MESSAGE_ID, "")


def _plain_texts(header: bytes) -> Mapping[int, str] | None:
    """The texts among the properties, by flag, if the properties are those of most messages: no
    headers, and no times."""
    flags = int.from_bytes(header[_CONTENT.size : _CONTENT.size + 2])
    if flags & ~_PLAIN or len(header) < _CONTENT.size + 2:
        return None
    offset = _CONTENT.size + 2
    texts: dict[int, str] = {}
    with suppress(UnicodeDecodeError, IndexError):
        for flag in _PLAIN_IN_ORDER:
            if not flags & flag:
                continue
            if flag == _DELIVERY_MODE:
                offset += 1
            elif flag == _HEADERS:
                if header[offset : offset + 4] != _NO_HEADERS:
                    return None
                offset += 4
            else:
                end = offset + 1 + header[offset]
                texts[flag] = header[offset + 1 : end].decode()
                offset = end
        if offset <= len(header):
            return texts
    return None


def _decoded(header: bytes) -> Basic.Properties:
    content = ContentHeader()
    content.unmarshal(header)
    return content.properties


def _num_returns(headers: FieldTable) -> int:
    counted = headers.get(_RETURNS_HEADER, 0)
    return max(counted if isinstance(counted, int) else 0, 1)


def _first_death(headers: FieldTable) -> float:
    """The time of the oldest entry of ``x-death``; 0 if there is none."""
    deaths = headers.get(_DEATHS_HEADER)
    if not isinstance(deaths, list):
        return 0.0
    times = [_unix_time(death.get("time")) for death in deaths if isinstance(death, dict)]
    return min(filter(None, times), default=0.0)


def _unix_time(value: object) -> float:
    return value.timestamp() if isinstance(value, datetime) else 0.0


def queue_arguments(queue: Queue) -> dict[str, str | int]:
    """The AMQP arguments of a queue declaration, with times in milliseconds."""
    arguments: dict[str, str | int] = {"x-queue-type": queue.kind}
    if queue.expires_s is not None:
        arguments["x-expires"] = max(1, round(queue.expires_s * 1000))
    if queue.ttl_s is not None:
        arguments["x-message-ttl"] = round(queue.ttl_s * 1000)
    if queue.max_length is not None:
        arguments |= {"x-max-length": queue.max_length, "x-overflow": "reject-publish"}
    if queue.delivery_limit is not None:
        arguments["x-delivery-limit"] = queue.delivery_limit
    if queue.dead_letter is not None:
        arguments["x-dead-letter-exchange"] = queue.dead_letter.exchange.name
        arguments["x-dead-letter-routing-key"] = queue.dead_letter.routing_key
    if queue.dead_letter is not None and queue.kind == "quorum":
        # At-least-once dead-lettering requires this overflow policy.
        arguments["x-dead-letter-strategy"] = "at-least-once"
        arguments["x-overflow"] = "reject-publish"
    return arguments


@contextmanager
def translated(doing: str, carrier: Channel | Connection) -> Iterator[None]:
    """Translate a failure of a call over ``carrier`` into a bus error; ``doing`` describes the
    call.

    Other exceptions propagate unless the carrier was closed, in which case its closing is taken as
    the cause.
    """
    try:
        yield
    except BusError:
        raise
    except AMQP_FAILURES as error:
        raise _meaning(error, doing) from error
    except asyncio.CancelledError as error:
        raise BusUnavailable(f"{doing}: the connection was closed") from error
    except Exception as error:
        if not carrier.is_closed:
            raise
        raise BusUnavailable(f"{doing}: the connection was lost: {_text(error)}") from error


def is_asked_for(error: BaseException | None) -> bool:
    """Whether a channel that ended with ``error`` was closed by this side."""
    if type(error) is ChannelClosed:
        reply_code, *_ = error.args
        return reply_code is None
    return error is None or isinstance(error, asyncio.CancelledError)


def is_absence(error: BaseException | None) -> bool:
    """Whether a channel ended with ``error`` because its queue does not exist."""
    return isinstance(error, ChannelNotFoundEntity) and isinstance(
        _meaning(error, ""), QueueNotFound
    )


def is_answer(error: BaseException | None) -> bool:
    """Whether a channel that ended with ``error`` was closed by this side, or by the broker to
    answer a call, such as that a queue does not exist."""
    is_meant = isinstance(error, AMQPError) and not isinstance(_meaning(error, ""), BusUnavailable)
    return is_meant or is_asked_for(error)


def _meaning(error: Exception, doing: str) -> BusError:
    text = f"{doing}: {_text(error)}"
    match error:
        case ChannelNotFoundEntity() if _ABSENT.search(_text(error)):
            return QueueNotFound(text)
        case ChannelNotFoundEntity():
            return QueueDown(text)
        case ChannelLockedResource():
            return QueueBusy(text)
        case ChannelAccessRefused():
            return QueueBusy(text) if "exclusive use" in text else AccessRefused(text)
        case ChannelPreconditionFailed() if " arg '" in text:
            return BusError(text)  # declared with other arguments; other mismatches are ignored
        case ChannelPreconditionFailed() if "queue limit in" in text:
            return TooManyQueues(text)
        case TimeoutError():
            return BusUnavailable(f"{doing}: no answer in time")
        case _:
            return BusUnavailable(text)


def publish_error(error: BaseException | None, binding: Binding, num_bytes: int) -> BusError:
    """The error of a publish on a channel that ended with ``error``. An error that closes a channel
    fails everything in flight on the channel, of which one publish was the cause."""
    meaning = _publish_meaning(error, binding, num_bytes)
    meaning.__cause__ = error
    return meaning


def _publish_meaning(error: BaseException | None, binding: Binding, num_bytes: int) -> BusError:
    exchange = binding.exchange.name
    if error is None or isinstance(error, asyncio.CancelledError):
        return BusUnavailable(f"publish to {exchange}: the connection was closed")
    text = _text(error)
    match error:
        case ChannelNotFoundEntity() if f"'{exchange}'" in text:
            return Unroutable(text)
        case ChannelAccessRefused() if f"'{exchange}'" in text:
            return AccessRefused(text)
        case ChannelPreconditionFailed() if f"size {num_bytes} " in text:
            return MessageTooLarge(text)
        case _:
            return BusUnavailable(f"publish to {exchange}: {text}")


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__

"""Conversion to and from AMQP: messages, queue declarations, and failures, which become the errors
of `shared.errors`."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from aiormq import Channel, Connection
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    PublishError,
)
from pamqp import decode
from pamqp.commands import Basic
from pamqp.common import FieldTable

from shared.bus.base import Binding, Message, Queue
from shared.errors import (
    AccessRefused,
    BusError,
    BusUnavailable,
    MessageTooLarge,
    PublishRefused,
    QueueBusy,
    QueueDown,
    QueueNotFound,
    TooManyQueues,
    Unroutable,
)
from shared.messages import MSGPACK

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
    """Decode a short string; what is not UTF-8 becomes question marks, which take no more bytes."""
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


def to_properties(message: Message, user: str) -> Basic.Properties:
    """Convert a message that ``user`` publishes."""
    return Basic.Properties(
        content_type=message.content_type,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        headers=dict(message.headers),
        message_id=message.message_id,
        user_id=user,
        delivery_mode=_PERSISTENT,
        timestamp=datetime.fromtimestamp(message.published_at, UTC)
        if message.published_at
        else None,
    )


def to_message(delivered: DeliveredMessage) -> Message:
    """Convert a delivered message; headers that are neither text nor numbers are dropped."""
    properties = delivered.header.properties
    headers = properties.headers or {}
    return Message(
        delivered.body,
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


def _first_death(headers: FieldTable) -> float:
    """The time of the oldest entry of ``x-death``; 0 if there is none."""
    deaths = headers.get(_DEATHS_HEADER)
    if not isinstance(deaths, list):
        return 0.0
    times = [_unix_time(death.get("time")) for death in deaths if isinstance(death, dict)]
    return min(filter(None, times), default=0.0)


def _unix_time(value: object) -> float:
    return value.timestamp() if isinstance(value, datetime) else 0.0


def num_returns(delivered: DeliveredMessage) -> int:
    """The return count of quorum queues; for other queues 1 if the message was redelivered, else
    0."""
    if not delivered.redelivered:  # the header would be the publisher's own
        return 0
    headers = delivered.header.properties.headers or {}
    counted = headers.get(_RETURNS_HEADER, 0)
    return max(counted if isinstance(counted, int) else 0, 1)


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


@contextmanager
def translated_publish(binding: Binding, num_bytes: int, channel: Channel) -> Iterator[None]:
    """Translate a failure of one publish on ``channel`` into a bus error."""
    place = f"{binding.exchange.name} for {binding.routing_key}"
    with translated(f"publish to {place}", channel):
        try:
            yield
        except PublishError as error:
            raise Unroutable(f"no queue at {place}") from error
        except DeliveryError as error:
            raise PublishRefused(f"the broker refused a message to {place}") from error
        except AMQP_FAILURES as error:
            raise _publish_meaning(error, binding, num_bytes) from error


def is_asked_for(error: BaseException | None) -> bool:
    """Whether a channel that ended with ``error`` was closed by this side."""
    if type(error) is ChannelClosed:
        reply_code, *_ = error.args
        return reply_code is None
    return error is None or isinstance(error, asyncio.CancelledError)


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


def _publish_meaning(error: Exception, binding: Binding, num_bytes: int) -> BusError:
    """A channel error fails all publishes in flight on the channel; only one of them caused it."""
    text = _text(error)
    exchange = binding.exchange.name
    match error:
        case ChannelNotFoundEntity() if f"'{exchange}'" in text:
            return Unroutable(text)
        case ChannelAccessRefused() if f"'{exchange}'" in text:
            return AccessRefused(text)
        case ChannelPreconditionFailed() if f"size {num_bytes} " in text:
            return MessageTooLarge(text)
        case _:
            return BusUnavailable(f"publish to {exchange}: {text}")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__

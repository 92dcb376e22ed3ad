"""Messages as AMQP has them: properties, headers and a body."""

from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from shared.bus.base import Message
from shared.messages import MSGPACK
from shared.topology import RETURNS_HEADER

_PERSISTENT = 2


def to_properties(message: Message) -> Basic.Properties:
    expires_s = message.expires_s
    return Basic.Properties(
        content_type=message.content_type,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        expiration=None if expires_s is None else str(max(0, round(expires_s * 1000))),
        headers=dict(message.headers),
        message_id=message.message_id,
        delivery_mode=_PERSISTENT,
    )


def to_message(delivered: DeliveredMessage) -> Message:
    """Any program's message; headers that are neither text nor numbers are left out."""
    properties = delivered.header.properties
    headers = properties.headers or {}
    expiration = str(properties.expiration or "")
    return Message(
        delivered.body,
        content_type=properties.content_type or MSGPACK,
        correlation_id=properties.correlation_id or "",
        reply_to=properties.reply_to or "",
        expires_s=int(expiration) / 1000 if expiration.isdecimal() else None,
        headers={
            name: value
            for name, value in headers.items()
            if isinstance(value, str | int) and name != RETURNS_HEADER
        },
        message_id=properties.message_id or "",
    )


def num_returns(delivered: DeliveredMessage) -> int:
    """What quorum queues count; others say only whether it was delivered before."""
    headers = delivered.header.properties.headers or {}
    counted = headers.get(RETURNS_HEADER, 0)
    return max(counted if isinstance(counted, int) else 0, int(bool(delivered.redelivered)))

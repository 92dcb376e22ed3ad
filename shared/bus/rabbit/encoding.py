"""Conversion of messages and queue declarations to and from AMQP."""

from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from shared.bus.base import Message, Queue
from shared.messages import MSGPACK

_PERSISTENT = 2
_RETURNS_HEADER = "x-delivery-count"
"""Set by quorum queues: how often a message was returned."""


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
    """Convert a delivered message; headers that are neither text nor numbers are dropped."""
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
            if isinstance(value, str | int) and name != _RETURNS_HEADER
        },
        message_id=properties.message_id or "",
    )


def num_returns(delivered: DeliveredMessage) -> int:
    """The return count of quorum queues; for other queues 1 if the message was redelivered, else
    0."""
    headers = delivered.header.properties.headers or {}
    counted = headers.get(_RETURNS_HEADER, 0)
    return max(counted if isinstance(counted, int) else 0, int(bool(delivered.redelivered)))


def queue_arguments(queue: Queue) -> dict[str, str | int]:
    """The AMQP arguments of a queue declaration, with times in milliseconds."""
    arguments: dict[str, str | int] = {"x-queue-type": queue.kind}
    if queue.expires_s is not None:
        arguments["x-expires"] = max(1, round(queue.expires_s * 1000))
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

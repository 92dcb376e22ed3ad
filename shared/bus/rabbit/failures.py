"""Translates AMQP failures into the errors of `shared.errors`."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiormq import Channel, Connection
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

from shared.bus.base import Binding
from shared.errors import (
    AccessRefused,
    BusError,
    BusUnavailable,
    MessageTooLarge,
    PublishRefused,
    QueueBusy,
    QueueNotFound,
    Unroutable,
)

AMQP_FAILURES = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError)


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


def _meaning(error: Exception, doing: str) -> BusError:
    text = f"{doing}: {_text(error)}"
    match error:
        case ChannelNotFoundEntity():
            return QueueNotFound(text)
        case ChannelLockedResource():
            return QueueBusy(text)
        case ChannelAccessRefused():
            return QueueBusy(text) if "exclusive use" in text else AccessRefused(text)
        case ChannelPreconditionFailed() if " arg '" in text:
            return BusError(text)  # declared with other arguments; other mismatches are ignored
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

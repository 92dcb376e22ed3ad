"""What AMQP failures mean in the terms of `shared.errors`."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
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
    PublishUnconfirmed,
    QueueBusy,
    QueueNotFound,
    Unroutable,
)

AMQP_FAILURES = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise AMQP failures of a call as errors of the bus; ``doing`` says what was being done."""
    try:
        with heeding_cancellation():
            yield
    except AMQP_FAILURES as error:
        raise _meaning(error, doing) from error
    except asyncio.CancelledError as error:
        raise_if_cancelled(error)
        raise BusUnavailable(f"{doing}: the connection was closed") from error
    except Exception as error:
        _raise_unless_bare(error)
        raise BusUnavailable(f"{doing}: the connection was closed") from error


@contextmanager
def translated_publish(binding: Binding, num_bytes: int) -> Iterator[None]:
    """Raise AMQP failures of one publish as errors of the bus."""
    place = f"{binding.exchange.name} for {binding.routing_key}"
    try:
        with heeding_cancellation():
            yield
    except PublishError as error:
        raise Unroutable(f"no queue at {place}") from error
    except DeliveryError as error:
        raise PublishRefused(f"the broker refused a message to {place}") from error
    except TimeoutError as error:
        raise PublishUnconfirmed(f"no confirmation in time for {place}") from error
    except AMQP_FAILURES as error:
        raise _publish_meaning(error, binding, num_bytes) from error
    except asyncio.CancelledError as error:
        raise_if_cancelled(error)
        raise BusUnavailable(f"publish to {place}: the connection was closed") from error
    except Exception as error:
        _raise_unless_bare(error)
        raise BusUnavailable(f"publish to {place}: the connection was closed") from error


@contextmanager
def heeding_cancellation() -> Iterator[None]:
    """Raise the cancellation that a call has swallowed: `asyncio.wait_for`, on which aiormq waits,
    does so up to Python 3.11 where the answer comes at the same moment. A task that is not
    cancelled may wait for ever, and whoever waits for its end, too."""
    task = asyncio.current_task()
    num_before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > num_before:
        raise asyncio.CancelledError


def raise_if_cancelled(error: BaseException) -> None:
    """Pass on a cancellation of this task. aiormq raises the same of a connection it closed, and
    may raise that a connection failed when it is this task that was cancelled."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from error


def _raise_unless_bare(error: Exception) -> None:
    """Pass on unexpected errors; aiormq fails calls with a plain ``Exception`` where their
    connection ended without a reason."""
    if type(error) is not Exception:
        raise error


def _meaning(error: Exception, doing: str) -> BusError:
    text = f"{doing}: {_text(error)}"
    match error:
        case ChannelNotFoundEntity():
            return QueueNotFound(text)
        case ChannelLockedResource():
            return QueueBusy(text)
        case ChannelAccessRefused():
            return QueueBusy(text) if "exclusive use" in text else AccessRefused(text)
        case ChannelPreconditionFailed():
            return BusError(text)
        case TimeoutError():
            return BusUnavailable(f"{doing}: no answer in time")
        case _:
            return BusUnavailable(text)


def _publish_meaning(error: Exception, binding: Binding, num_bytes: int) -> BusError:
    """A channel error hits all publishes in flight on its channel: only the one it names failed."""
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

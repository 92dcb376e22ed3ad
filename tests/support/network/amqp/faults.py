"""Faults that a broker or a network may cause at any frame, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pamqp.commands import Basic, Queue
from pamqp.header import ContentHeader

from tests.support.network.amqp.frames import Frame
from tests.support.network.amqp.proxy import Conversation, Deal

_UNKNOWN_KIND = 9
_UNKNOWN_METHOD = b"\x00\x7b\x00\x7b"
_UNUSED_CHANNEL = 1999
"""A port on which no test accepts connections."""


@dataclass(frozen=True)
class Fault:
    """A fault that may strike at a frame of the broker."""

    fits: Callable[[Conversation, Frame], bool]
    strike: Deal


def is_ack(conversation: Conversation, frame: Frame) -> bool:
    return conversation.published(frame) is not None


def _is_any(conversation: Conversation, frame: Frame) -> bool:
    return True


def _is_after_handshake(conversation: Conversation, frame: Frame) -> bool:
    """aiormq reports an unreadable frame during the handshake as a refused login."""
    return conversation.is_open


def _is_inside_message(conversation: Conversation, frame: Frame) -> bool:
    return frame.is_content


def _confirm_twice(conversation: Conversation, frame: Frame) -> None:
    conversation.pass_on(frame)
    conversation.say_raw(frame.raw)


def _lose(conversation: Conversation, frame: Frame) -> None:
    """Drop the frame."""


def _closes_channel(code: int, text: str) -> Deal:
    def close(conversation: Conversation, frame: Frame) -> None:
        conversation.close_channel(frame.channel, code, text)

    return close


def _closes_connection(conversation: Conversation, frame: Frame) -> None:
    conversation.close_connection(320, "CONNECTION_FORCED - broker forced connection closure")


def _cancel(conversation: Conversation, frame: Frame) -> None:
    """Cancel the channel's consumer, and drop the deliveries that were on their way to it."""
    conversation.cancel_consumer(frame.channel)
    if frame.name != Basic.Deliver.name:
        conversation.pass_on(frame)


def _cut(conversation: Conversation, frame: Frame) -> None:
    conversation.cut(frame)


def _reset(conversation: Conversation, frame: Frame) -> None:
    conversation.cut(frame, is_reset=True)


def _spoil_end(conversation: Conversation, frame: Frame) -> None:
    conversation.say_raw(frame.raw[:-1] + b"\x00")


def _spoil_kind(conversation: Conversation, frame: Frame) -> None:
    conversation.say_raw(bytes([_UNKNOWN_KIND]) + frame.raw[1:])


def _spoil_method(conversation: Conversation, frame: Frame) -> None:
    conversation.say_raw(frame.raw[:7] + _UNKNOWN_METHOD + frame.raw[11:])


def _speak_on_unknown_channel(conversation: Conversation, frame: Frame) -> None:
    conversation.say(_UNUSED_CHANNEL, Basic.Ack(delivery_tag=1))
    conversation.pass_on(frame)


def _answer_unasked_get(conversation: Conversation, frame: Frame) -> None:
    conversation.say(frame.channel, Basic.GetOk(1, False, "", "", 0), ContentHeader())
    conversation.pass_on(frame)


def _answer_unasked_call(conversation: Conversation, frame: Frame) -> None:
    conversation.say(frame.channel, Queue.PurgeOk(1))
    conversation.pass_on(frame)


def _return_unknown(conversation: Conversation, frame: Frame) -> None:
    header = ContentHeader(properties=Basic.Properties(message_id="unknown"))
    conversation.say(frame.channel, Basic.Return(312, "NO_ROUTE", "", ""), header)
    conversation.pass_on(frame)


def is_channel_open(conversation: Conversation, frame: Frame) -> bool:
    return conversation.is_channel_open(frame)


NACK = Fault(is_ack, Conversation.nack)
RETURN = Fault(is_ack, Conversation.give_back)
CANCEL = Fault(
    lambda conversation, frame: (
        is_channel_open(conversation, frame) and conversation.has_consumer(frame)
    ),
    _cancel,
)
NOT_FOUND = Fault(
    is_channel_open, _closes_channel(404, "NOT_FOUND - no queue 'other' in vhost 'warren'")
)
CUT = Fault(_is_any, _cut)
INTERNAL_ERROR = Fault(is_channel_open, _closes_channel(541, "INTERNAL_ERROR"))

ANSWER = Fault(lambda _, frame: frame.channel > 0, Conversation.pass_on)
"""No fault at all, on any frame of the broker."""

FAULTS: Mapping[str, Fault] = {
    "nack": NACK,
    "nack of several": Fault(is_ack, Conversation.nack_all),
    "return": RETURN,
    "ack twice": Fault(is_ack, _confirm_twice),
    "ack lost": Fault(is_ack, _lose),
    "403 closes channel": Fault(
        is_channel_open, _closes_channel(403, "ACCESS_REFUSED - access to exchange 'other' refused")
    ),
    "404 closes channel": NOT_FOUND,
    "406 closes channel": Fault(
        is_channel_open, _closes_channel(406, "PRECONDITION_FAILED - unknown delivery tag 1")
    ),
    "541 closes channel": INTERNAL_ERROR,
    "channel closed inside of a message": Fault(_is_inside_message, INTERNAL_ERROR.strike),
    "320 closes connection": Fault(_is_after_handshake, _closes_connection),
    "consumer cancelled": CANCEL,
    "connection cut inside of a frame": CUT,
    "connection reset inside of a frame": Fault(_is_any, _reset),
    "frame with a wrong end": Fault(_is_after_handshake, _spoil_end),
    "frame of an unknown kind": Fault(_is_after_handshake, _spoil_kind),
    "unknown method": Fault(is_channel_open, _spoil_method),
    "frame on an unknown channel": Fault(_is_after_handshake, _speak_on_unknown_channel),
    "answer to no get": Fault(is_channel_open, _answer_unasked_get),
    "answer to no call": Fault(is_channel_open, _answer_unasked_call),
    "return of an unknown message": Fault(is_channel_open, _return_unknown),
}


def late(deliver: Deal, delay_s: float) -> Fault:
    """Confirm a publish after its client has stopped waiting."""

    def strike(conversation: Conversation, frame: Frame) -> None:
        conversation.delay(frame, delay_s, lambda late: deliver(conversation, late))

    return Fault(is_ack, strike)

"""A proxy that understands AMQP and can send frames on behalf of the broker."""

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from pamqp.base import Frame as Method
from pamqp.commands import Basic, Channel, Connection
from pamqp.frame import FrameTypes

from tests.support.network.amqp.frames import Frame, Splitter, marshal
from tests.support.network.tcp_proxy import PassOn, TcpProxy

_ABORTING = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose close resets the connection."""


@dataclass(frozen=True)
class Publish:
    """A message that the broker has not confirmed yet."""

    method: Basic.Publish
    content: bytes
    """Its header and body, as the client sent them."""


@dataclass
class _Closing:
    """A channel that the proxy has closed on behalf of the broker, until both sides have agreed."""

    awaits_client: bool = True
    awaits_broker: bool = True
    passes_close_ok: bool = False
    """Whether the client has asked to close the channel itself, just before."""
    queued: list[Frame] = field(default_factory=list)
    """The frames that the client sends in the meantime on a new channel with the same number."""


@dataclass
class _Channel:
    is_open: bool = False
    is_left: bool = False
    """Whether the client has asked to close it."""
    num_published: int = 0
    publishes: dict[int, Publish] = field(default_factory=dict)
    """By delivery tag."""
    consumers: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    """Consumers that were cancelled on behalf of the broker; their deliveries are dropped."""
    sending: list[Frame] = field(default_factory=list)
    """A message from the client that is still incomplete."""
    num_missing: int = 0
    has_returned: bool = False
    """Whether the broker itself has returned the message that it confirms next."""
    is_swallowing: bool = False
    """Whether the message that the broker is sending is to be dropped."""
    closing: _Closing | None = None


class Conversation:
    """A connection between a client and the broker.

    A policy sees each frame of the broker before the client does, and can use the methods below to
    cause something else instead. Each method keeps client and broker in agreement about the state
    of the channel.
    """

    def __init__(
        self, client: asyncio.StreamWriter, broker: asyncio.StreamWriter, policy: "Policy"
    ) -> None:
        self.is_open = False
        """Whether the handshake is over."""
        self.is_over = False
        self._client = client
        self._broker = broker
        self._policy = policy
        self._channels: dict[int, _Channel] = {}
        self._from_client = Splitter()
        self._from_broker = Splitter()
        self._has_begun = False
        self._held: list[Callable[[], None]] | None = None

    @property
    def num_channels(self) -> int:
        """The channels that are open on both sides."""
        return sum(c.is_open and c.closing is None for c in self._channels.values())

    def feed_client(self, data: bytes) -> None:
        """Process bytes from the client."""
        if not self._has_begun:
            self._has_begun = True
            header, data = self._from_client.take_protocol_header(data)
            self._to_broker(header)
        for frame in self._from_client.feed(data):
            if self.is_over:
                self._take_last_word(frame)
            else:
                self._take_from_client(frame)

    def feed_broker(self, data: bytes) -> None:
        """Process bytes from the broker."""
        for frame in self._from_broker.feed(data):
            if not self.is_over:
                self._take_from_broker(frame)

    # Questions of a policy.

    def has_consumer(self, frame: Frame) -> bool:
        return bool(self._channel_of(frame).consumers)

    def is_channel_open(self, frame: Frame) -> bool:
        """Whether the broker could send something else on the frame's channel before this frame,
        which is the case unless the frame continues a message."""
        is_end = frame.name in (Channel.Close.name, Channel.CloseOk.name)
        return bool(frame.name) and not is_end and frame.channel in self._channels

    def published(self, ack: Frame) -> Publish | None:
        """The message that a `Basic.Ack` confirms; the last message if it confirms several."""
        if ack.name != Basic.Ack.name:
            return None
        return self._channel_of(ack).publishes.get(_tag_of(ack))

    # Actions of a policy.

    def pass_on(self, frame: Frame) -> None:
        """Pass a frame of the broker to the client."""
        self._note_from_broker(frame)
        self._to_client(frame.raw)

    def say(self, channel: int, *frames: FrameTypes) -> None:
        """Send frames to the client that do not come from the broker."""
        self._to_client(b"".join(marshal(frame, channel) for frame in frames))

    def say_raw(self, raw: bytes) -> None:
        """Send bytes to the client that need not be a frame."""
        self._to_client(raw)

    def nack(self, ack: Frame) -> None:
        """Nack the message that the broker confirms, and confirm the messages before it."""
        tag, publishes = _tag_of(ack), self._channel_of(ack).publishes
        if _ack(ack).multiple:
            self.say(ack.channel, *(Basic.Ack(before) for before in publishes if before < tag))
        self._note_from_broker(ack)
        self.say(ack.channel, Basic.Nack(tag))

    def nack_all(self, ack: Frame) -> None:
        """Nack the message that the broker confirms, and all earlier messages that were not
        confirmed yet."""
        self.say(ack.channel, Basic.Nack(_tag_of(ack), multiple=True))
        for before in [tag for tag in self._channel_of(ack).publishes if tag <= _tag_of(ack)]:
            del self._channel_of(ack).publishes[before]

    def give_back(self, ack: Frame) -> None:
        """Return the message that the broker confirms as unroutable."""
        publish = self.published(ack)
        if publish is not None and not self._channel_of(ack).has_returned:
            returned = Basic.Return(
                312, "NO_ROUTE", publish.method.exchange, publish.method.routing_key
            )
            self._to_client(marshal(returned, ack.channel) + publish.content)
        self.pass_on(ack)

    def delay(self, frame: Frame, delay_s: float, deliver: Callable[[Frame], None]) -> None:
        """Call ``deliver`` with the frame later, unless its channel has ended by then. Later frames
        do not wait for it."""
        channel = self._channels.get(frame.channel)

        def deliver_late() -> None:
            if channel is None or self._channels.get(frame.channel) is not channel:
                return
            if channel.closing is None and not self.is_over:
                deliver(frame)

        asyncio.get_running_loop().call_later(delay_s, deliver_late)

    def close_channel(self, number: int, code: int, text: str) -> None:
        """End a channel with an error, and drop everything that either side still sends on it."""
        channel = self._channels[number]
        channel.closing = _Closing(passes_close_ok=channel.is_left)
        if not channel.is_left:
            self._to_broker(marshal(Channel.Close(200, "closed by the proxy", 0, 0), number))
        self.say(number, Channel.Close(code, text, 0, 0))

    def cancel_consumer(self, number: int) -> None:
        """Tell the client that the broker has cancelled its consumer, and cancel it at the broker
        as well."""
        channel = self._channels[number]
        tag = channel.consumers.pop()
        channel.cancelled.add(tag)
        self._to_broker(marshal(Basic.Cancel(tag, nowait=True), number))
        self.say(number, Basic.Cancel(tag, nowait=True))

    def close_connection(self, code: int, text: str) -> None:
        """Close the connection on behalf of the broker."""
        self.say(0, Connection.Close(code, text, 0, 0))
        self.is_over = True

    def cut(self, frame: Frame, *, is_reset: bool = False) -> None:
        """Cut the connection after half of the frame."""
        self._to_client(frame.raw[: len(frame.raw) // 2])
        self.is_over = True
        self._do(self._reset if is_reset else self._end)

    def hold(self) -> None:
        """Hold back everything for the client until `release`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        held, self._held = self._held or [], None
        for action in held:
            action()

    # From the client to the broker.

    def _take_from_client(self, frame: Frame) -> None:
        channel = self._channels.get(frame.channel)
        if channel is not None and channel.closing is not None:
            self._take_while_closing(frame, channel, channel.closing)
            return
        if channel is not None and (channel.sending or frame.name == Basic.Publish.name):
            self._assemble(frame, channel)
            return
        self._note_from_client(frame)
        self._to_broker(frame.raw)

    def _assemble(self, frame: Frame, channel: _Channel) -> None:
        """Pass only whole messages to the broker, because a channel may end only between
        messages."""
        channel.sending.append(frame)
        channel.num_missing += frame.num_missing if frame.is_content else 0
        if channel.num_missing or len(channel.sending) == 1:
            return
        publish, *content = channel.sending
        channel.sending = []
        raw = b"".join(part.raw for part in content)
        channel.num_published += 1
        method = publish.method
        assert isinstance(method, Basic.Publish)
        channel.publishes[channel.num_published] = Publish(method, raw)
        self._to_broker(publish.raw + raw)

    def _note_from_client(self, frame: Frame) -> None:
        match frame.name:
            case Channel.Open.name:
                self._channels[frame.channel] = _Channel()
            case Channel.Close.name:
                self._channel_of(frame).is_left = True
            case Channel.CloseOk.name:
                self._channels.pop(frame.channel, None)

    def _take_while_closing(self, frame: Frame, channel: _Channel, closing: _Closing) -> None:
        if not closing.awaits_client:
            closing.queued.append(frame)
        elif frame.name == Channel.Close.name:
            self.say(frame.channel, Channel.CloseOk())
        elif frame.name == Channel.CloseOk.name:
            closing.awaits_client = False
            self._finish_closing(frame.channel, closing)

    def _finish_closing(self, number: int, closing: _Closing) -> None:
        if closing.awaits_client or closing.awaits_broker:
            return
        del self._channels[number]
        for frame in closing.queued:
            self._take_from_client(frame)

    def _take_last_word(self, frame: Frame) -> None:
        if frame.name == Connection.CloseOk.name:
            self._end()

    # From the broker to the client.

    def _take_from_broker(self, frame: Frame) -> None:
        channel = self._channels.get(frame.channel)
        if channel is not None and channel.closing is not None:
            self._swallow_while_closing(frame, channel.closing)
            return
        if channel is not None and self._is_of_cancelled(frame, channel):
            return
        deal = self._policy(self, frame)
        if deal is None:
            self.pass_on(frame)
        else:
            deal(self, frame)

    def _swallow_while_closing(self, frame: Frame, closing: _Closing) -> None:
        if frame.name == Channel.Close.name:  # an error of the client's, at the same moment
            self._to_broker(marshal(Channel.CloseOk(), frame.channel))
        elif frame.name == Channel.CloseOk.name:
            if closing.passes_close_ok:
                self._to_client(frame.raw)
            closing.awaits_broker = False
            self._finish_closing(frame.channel, closing)

    def _is_of_cancelled(self, frame: Frame, channel: _Channel) -> bool:
        """Whether the frame belongs to a delivery for a cancelled consumer."""
        if frame.name == Basic.Deliver.name and channel.cancelled:
            method = frame.method
            assert isinstance(method, Basic.Deliver)
            channel.is_swallowing = method.consumer_tag in channel.cancelled
        elif not frame.is_content:
            channel.is_swallowing = False
        return channel.is_swallowing

    def _note_from_broker(self, frame: Frame) -> None:
        match frame.name:
            case Connection.OpenOk.name:
                self.is_open = True
            case Channel.OpenOk.name:
                self._channel_of(frame).is_open = True
            case Channel.CloseOk.name:
                self._channels.pop(frame.channel, None)
            case Basic.ConsumeOk.name | Basic.CancelOk.name | Basic.Cancel.name:
                self._note_consumer(frame.method, self._channel_of(frame))
            case Basic.Return.name:
                self._channel_of(frame).has_returned = True
            case Basic.Ack.name | Basic.Nack.name:
                self._channel_of(frame).has_returned = False
                self._note_confirmed(frame)

    def _note_consumer(self, method: Method, channel: _Channel) -> None:
        match method:
            case Basic.ConsumeOk():
                channel.consumers.add(method.consumer_tag or "")
            case Basic.CancelOk() | Basic.Cancel():
                channel.consumers.discard(method.consumer_tag)

    def _note_confirmed(self, frame: Frame) -> None:
        method, publishes = frame.method, self._channel_of(frame).publishes
        assert isinstance(method, Basic.Ack | Basic.Nack)
        if method.multiple:
            for tag in [tag for tag in publishes if tag <= (method.delivery_tag or 0)]:
                del publishes[tag]
        else:
            publishes.pop(method.delivery_tag or 0, None)

    def _channel_of(self, frame: Frame) -> _Channel:
        """The frame's channel; an empty channel if both sides have closed it."""
        return self._channels.get(frame.channel, _Channel())

    # Sending.

    def _to_broker(self, raw: bytes) -> None:
        if not self._broker.is_closing():
            self._broker.write(raw)

    def _to_client(self, raw: bytes) -> None:
        if not self.is_over:
            self._do(lambda: self._write_to_client(raw))

    def _write_to_client(self, raw: bytes) -> None:
        if not self._client.is_closing():
            self._client.write(raw)

    def _do(self, action: Callable[[], None]) -> None:
        if self._held is None:
            action()
        else:
            self._held.append(action)

    def _end(self) -> None:
        self.is_over = True
        self._client.close()
        self._broker.transport.abort()

    def _reset(self) -> None:
        raw_socket = self._client.get_extra_info("socket")
        raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORTING)
        self._client.transport.abort()
        self._broker.transport.abort()


Deal = Callable[[Conversation, Frame], None]
"""Does something instead of passing the frame on."""
Policy = Callable[[Conversation, Frame], Deal | None]
"""Called with each frame of the broker. Returns what to do instead, or None to pass it on."""


def leave_alone(conversation: Conversation, frame: Frame) -> None:
    """The policy of a network without faults."""


class AmqpProxy(TcpProxy):
    """Forwards the broker's frames according to ``policy``, which may change at any time."""

    def __init__(self, url: str, policy: Policy = leave_alone) -> None:
        super().__init__(url)
        self.policy = policy
        self._conversations: dict[asyncio.StreamWriter, Conversation] = {}
        """By what writes to their clients."""

    @property
    def num_channels(self) -> int:
        """Channels that clients have open."""
        return sum(c.num_channels for c in self._conversations.values() if not c.is_over)

    def _directions(
        self, client: asyncio.StreamWriter, target: asyncio.StreamWriter
    ) -> tuple[PassOn, PassOn]:
        conversation = Conversation(client, target, lambda talk, frame: self.policy(talk, frame))
        self._conversations[client] = conversation
        return conversation.feed_client, conversation.feed_broker

    def _close(self, writer: asyncio.StreamWriter) -> None:
        self._conversations.pop(writer, None)
        super()._close(writer)


def _ack(frame: Frame) -> Basic.Ack:
    assert isinstance(frame.method, Basic.Ack)
    return frame.method


def _tag_of(ack: Frame) -> int:
    return _ack(ack).delivery_tag or 0

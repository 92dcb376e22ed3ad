"""The frames of messages, their confirmations and acknowledgements, which do not pass through
aiormq one by one.

aiormq 7.2.4 awaits each frame three times, decodes its fields by reflection, and passes it through
a queue to a task of its channel; a message has three frames. That is most of what a message costs
its reader. Here, the bytes of a read are divided at once, each channel's `MessageFrames` take what
belongs to messages, and only the remaining frames reach aiormq, which knows nothing of it: it is
given a transport and a stream as it would make them itself. In the other direction, an `Outbox`
collects what is sent within a turn of the event loop.
"""

import asyncio
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, SupportsIndex

from aiormq.abc import ChannelFrame
from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
from pamqp.commands import Basic, Channel
from yarl import URL

METHOD, CONTENT_HEADER, CONTENT_BODY = 1, 2, 3
_HEARTBEAT = 8
_FRAME = struct.Struct(">BHI")
"""The kind of a frame, its channel, and the length of its payload, which an end follows."""
_END = 0xCE
_END_BYTES = bytes((_END,))
_BODY_SIZE = struct.Struct(">4xQ")
_CONFIRMATION = struct.Struct(">4xQB")
_DELIVERY = struct.Struct(">Q?")
_CLOSINGS = (Channel.Close.index, Channel.CloseOk.index)
_WITH_CONTENT = (Basic.Deliver.index, Basic.Return.index)
_NEVER_ASKED = (Basic.GetOk.index, Basic.GetEmpty.index)
"""Answers to a call that Warren never makes. aiormq's reader of the channel dies of them, which
aiormq notices after a heartbeat, and until then the channel seems to be open."""
_LIMIT = 1 << 16
_BEAT = bytes((_HEARTBEAT, 0, 0, 0, 0, 0, 0, _END))
_BEAT_INTERVAL_S = 0.1
"""What aiormq's time of the last frame may be too early by. A node that has sent a message may send
its next heartbeat only an interval of heartbeats later, and aiormq waits hardly longer."""


def frame_parts(kind: int, channel: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
    """The bytes of a frame. The payload is not copied."""
    return _FRAME.pack(kind, channel, len(payload)), payload, _END_BYTES


def confirmation_of(payload: bytes) -> tuple[int, bool]:
    """The delivery tag of ``Basic.Ack`` and ``Basic.Nack``, and whether all messages before are
    meant, too."""
    tag, flags = _CONFIRMATION.unpack_from(payload)
    return tag, bool(flags & 1)


def delivery_of(payload: bytes) -> tuple[int, bool]:
    """The delivery tag of ``Basic.Deliver``, and whether the message was delivered before."""
    return _DELIVERY.unpack_from(payload, 5 + payload[4])


class Outbox:
    """Frames on their way to the broker. The frames of a turn of the event loop leave in one write.

    They pass through aiormq's queue: so they keep their order with the frames of aiormq, and
    nothing follows the end of the connection. aiormq confirms the end of a channel some turns after
    it was read, behind everything that was sent on the channel until then.
    """

    def __init__(self, queue: "asyncio.Queue[ChannelFrame]") -> None:
        """``queue`` has no bound."""
        self._queue = queue
        self._unsent: list[bytes] = []

    def send(self, frames: bytes) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frames)

    def _flush(self) -> None:
        payload = b"".join(self._unsent)
        self._unsent.clear()
        self._queue.put_nowait(ChannelFrame(payload=payload, should_close=False))


class MessageFrames(ABC):
    """Takes the messages, and their confirmations, from the frames of one channel."""

    __slots__ = ("_header", "_is_message", "_num_missing", "_parts", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        """Whether the channel is closed, or about to be: the broker ends the connection if more is
        sent on it."""
        self._is_message = False
        """Whether the frames of a message are expected that `take_method` took."""
        self._header: bytes | None = None
        self._num_missing = 0
        self._parts: list[bytes] = []

    def take(self, kind: int, payload: bytes) -> bool:
        """Take a frame; False if it belongs to no message. Raises ValueError, `IndexError` or
        `struct.error` if it is malformed."""
        if kind == METHOD:
            method = int.from_bytes(payload[:4])
            self.is_over = self.is_over or method in _CLOSINGS
            self._header = None
            is_taken = self.take_method(method, payload)
            self._is_message = is_taken and method in _WITH_CONTENT
            return is_taken
        if not self._is_message:
            return False
        if kind == CONTENT_HEADER and self._header is None:
            self._header, self._parts = payload, []
            (self._num_missing,) = _BODY_SIZE.unpack_from(payload)
        elif kind == CONTENT_BODY and self._header is not None:
            self._parts.append(payload)
            self._num_missing -= len(payload)
        else:
            raise ValueError("a frame that continues no message")
        if self._num_missing <= 0:
            assert self._header is not None
            header, parts, self._parts = self._header, self._parts, []
            self._header, self._is_message = None, False
            self.take_message(header, parts[0] if len(parts) == 1 else b"".join(parts))
        return True

    @abstractmethod
    def take_method(self, method: int, payload: bytes) -> bool:
        """Take a method that confirms messages or begins one. False: it is passed on."""

    @abstractmethod
    def take_message(self, header: bytes, body: bytes) -> None:
        """Take the message that `take_method` saw begin. ``header`` is the payload of the frame
        with its properties."""

    def end(self) -> None:
        """End the channel, whose connection is closed."""
        self.is_over = True


class FrameStream(asyncio.StreamReader):
    """What aiormq reads of a connection: all frames that no channel's `MessageFrames` take."""

    def __init__(self) -> None:
        self._loop_time = asyncio.get_running_loop().time
        super().__init__(limit=_LIMIT, loop=asyncio.get_running_loop())
        self._channels: dict[int, MessageFrames] = {}
        self._rest = b""
        self._is_left_alone = False
        """Whether there was a fault, for which aiormq ends the connection: nothing is taken any
        more."""
        self._passed_at = self._loop_time()

    def listen(self, channel: int, frames: MessageFrames) -> None:
        """Give the messages of a channel to ``frames`` until the channel is closed."""
        self._channels[channel] = frames

    def end(self) -> None:
        """End all channels, whose connection is closed."""
        channels, self._channels = self._channels, {}
        for frames in channels.values():
            frames.end()

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        if self._is_left_alone:
            super().feed_data(data)
            return
        try:
            passed, is_alive = self._divide(self._rest + bytes(data))
        except (ValueError, IndexError, struct.error) as error:
            self._is_left_alone = True
            self.set_exception(ConnectionError(f"a frame that makes no sense: {error}"))
        else:
            self._pass_on(passed, is_alive=is_alive)

    def feed_eof(self) -> None:
        rest, self._rest = self._rest, b""  # empty when the end of the connection calls this again
        if rest:
            super().feed_data(rest)
        super().feed_eof()

    def _divide(self, data: bytes) -> tuple[bytes, bool]:
        """The frames for aiormq, and whether there were others. Raises ValueError, `IndexError` or
        `struct.error` if a frame is malformed."""
        passed: list[bytes] = []
        num_taken = begin = 0
        while len(data) - begin >= _FRAME.size:
            kind, channel, size = _FRAME.unpack_from(data, begin)
            first = begin + _FRAME.size
            last = first + size
            is_whole = last < len(data)
            if kind > _HEARTBEAT or (is_whole and data[last] != _END):
                self._is_left_alone, self._rest = True, b""
                return b"".join((*passed, data[begin:])), False
            if not is_whole:
                break
            if self._is_taken(kind, channel, data[first:last]):
                num_taken += 1
            else:
                passed.append(data[begin : last + 1])
            begin = last + 1
        self._rest = data[begin:]
        return b"".join(passed), num_taken > 0

    def _is_taken(self, kind: int, channel: int, payload: bytes) -> bool:
        frames = self._channels.get(channel)
        if frames is not None and frames.take(kind, payload):
            return True
        method = int.from_bytes(payload[:4]) if kind == METHOD else 0
        if method in _NEVER_ASKED:
            raise ValueError("the broker answers without a question")
        if method in _CLOSINGS:
            self._channels.pop(channel, None)
        return False

    def _pass_on(self, data: bytes, *, is_alive: bool) -> None:
        now = self._loop_time()
        if data:
            self._passed_at = now
        elif is_alive and now - self._passed_at > _BEAT_INTERVAL_S:
            # aiormq ends a connection that is silent, and a broker that sends messages sends no
            # heartbeats.
            self._passed_at, data = now, _BEAT
        super().feed_data(data)


class FrameTransport(TransportFactory):
    """Connects as aiormq's own factories do, with a `FrameStream`."""

    def __init__(self, max_unread_bytes: int) -> None:
        """``max_unread_bytes``: see `is_read`."""
        self._max_unread_bytes = max_unread_bytes
        self._writer: asyncio.StreamWriter | None = None
        self.stream: FrameStream | None = None
        """That of the connection, once there is one."""

    @property
    def is_read(self) -> bool:
        """Whether fewer bytes than the maximum wait until the broker reads them."""
        writer = self._writer
        return writer is None or writer.transport.get_write_buffer_size() <= self._max_unread_bytes

    async def wait_read(self) -> None:
        """Return when the broker has read most of what was sent. Raises OSError if the connection
        is lost."""
        if self._writer is not None:
            await self._writer.drain()

    async def create(
        self, url: URL, **kwargs: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        provider = kwargs.pop("ssl_context_provider")
        context = await provider.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        assert url.host is not None
        assert url.port is not None
        stream = FrameStream()
        protocol = asyncio.StreamReaderProtocol(stream, loop=loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, url.host, url.port, ssl=context, **kwargs
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        transport.set_write_buffer_limits(high=self._max_unread_bytes)
        writer = asyncio.StreamWriter(transport, protocol, stream, loop)
        self.stream, self._writer = stream, writer
        return stream, writer

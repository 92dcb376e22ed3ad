"""Splits a stream of bytes into AMQP 0-9-1 frames, which keep their bytes."""

import struct
from collections.abc import Iterator
from functools import cached_property

import pamqp.frame
from pamqp import commands
from pamqp.base import Frame as Method
from pamqp.frame import FrameTypes

_HEADER = struct.Struct(">BHI")
_METHOD, _CONTENT_HEADER, _CONTENT_BODY = 1, 2, 3
_PROTOCOL_HEADER_BYTES = 8
_BODY_SIZE = struct.Struct(">4xQ")
"""The offset of the body's length in a content header, after class and weight."""


class Frame:
    """A frame. Its method is decoded on demand."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.kind, self.channel, _ = _HEADER.unpack_from(raw)

    @property
    def name(self) -> str:
        """The method's name, as ``Basic.Ack``; empty for frames of other types."""
        if self.kind != _METHOD:
            return ""
        (index,) = struct.unpack_from(">I", self.raw, _HEADER.size)
        method: type[Method] | None = commands.INDEX_MAPPING.get(index)
        return "" if method is None else method.name

    @cached_property
    def method(self) -> Method:
        """Raises `AssertionError` for a frame that has none."""
        method = pamqp.frame.unmarshal(self.raw)[2]
        assert isinstance(method, Method)
        return method

    @property
    def is_content(self) -> bool:
        """Whether it is a part of a message: its header, or a piece of its body."""
        return self.kind in (_CONTENT_HEADER, _CONTENT_BODY)

    @property
    def num_missing(self) -> int:
        """The change that this part of a message makes to the number of bytes that are still
        expected."""
        if self.kind == _CONTENT_HEADER:
            size: int = _BODY_SIZE.unpack_from(self.raw, _HEADER.size)[0]
            return size
        return -(len(self.raw) - _HEADER.size - 1)


def marshal(method: FrameTypes, channel: int) -> bytes:
    return pamqp.frame.marshal(method, channel)


class Splitter:
    """Collects bytes as they arrive and returns complete frames."""

    def __init__(self) -> None:
        self._rest = b""

    def take_protocol_header(self, data: bytes) -> tuple[bytes, bytes]:
        """The protocol header with which a client begins, and the bytes after it."""
        return data[:_PROTOCOL_HEADER_BYTES], data[_PROTOCOL_HEADER_BYTES:]

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._rest += data
        begin = 0
        while len(self._rest) - begin >= _HEADER.size:
            _, _, size = _HEADER.unpack_from(self._rest, begin)
            end = begin + _HEADER.size + size + 1
            if end > len(self._rest):
                break
            yield Frame(self._rest[begin:end])
            begin = end
        self._rest = self._rest[begin:]

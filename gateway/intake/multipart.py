"""Reads multipart forms as they arrive: the bytes of the file are passed on and not kept."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException

from shared.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_IDLE_TIMEOUT_S = 60.0
_MIN_BYTES_PER_S = 4 << 10
"""The average rate that a client must keep up after the first `_IDLE_TIMEOUT_S`. Otherwise a client
that sends a byte now and then would hold its place, and the memory of its body, for ever."""
_MAX_FIELDS = 32
_MAX_FIELD_BYTES = 16 << 10
_MAX_HEADER_BYTES = 8 << 10
_MAX_OVERHEAD_BYTES = 1 << 20
"""The bytes that a form may have besides its file."""

Take = Callable[[str, bytes], Awaitable[None]]
"""Takes the file's name and its next bytes."""


@dataclass(slots=True)
class _Part:
    name: str
    filename: str | None
    value: bytearray = field(default_factory=bytearray)


async def read_form(
    request: Request, max_bytes: int, take: Take, name: str = "file"
) -> dict[str, str]:
    """Read a form with a single file of at most ``max_bytes``, whose field has this name.

    Calls ``take`` with its bytes in order, also once if it has none; returns the other fields.
    Raises HTTPException 408, 413 or 415, and `InvalidRequest`.
    """
    content_type, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if content_type != b"multipart/form-data" or not boundary:
        raise HTTPException(415, "The content type must be multipart/form-data.")
    form = _Form(name, max_bytes)
    form.require_size(int(request.headers.get("content-length", 0)))
    try:
        parser = MultipartParser(boundary, form.callbacks())
    except FormParserError as error:
        raise _invalid(error) from None
    chunks, num_bytes = request.stream(), 0
    waited_s = 0.0
    while True:
        left_s = _IDLE_TIMEOUT_S + num_bytes / _MIN_BYTES_PER_S - waited_s
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(min(_IDLE_TIMEOUT_S, left_s)):
                chunk = await anext(chunks, b"")
        except TimeoutError:
            raise HTTPException(408, "The body did not arrive in time.") from None
        waited_s += time.monotonic() - began_at  # for the client, not for the storage
        if not chunk:
            break
        num_bytes += len(chunk)
        try:
            parser.write(chunk)
        except FormParserError as error:
            raise _invalid(error) from None
        form.require_overhead(num_bytes)
        for filename, data in form.arrived():
            await take(filename, data)
    if not form.is_ended:
        raise InvalidRequest("The form is not complete.")
    if not form.has_file:
        raise InvalidRequest(f"{name}: required, but missing", param=name)
    return form.fields


class _Form:
    """The state of a form that is being parsed."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self._name = name
        self.fields: dict[str, str] = {}
        self.has_file = False
        self.is_ended = False
        self._max_bytes = max_bytes
        self._num_bytes = 0
        """The bytes of the file so far."""
        self._num_parts = 0
        self._num_header_bytes = 0
        self._header, self._value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._part = _Part("", None)
        self._arrived: list[tuple[str, bytes]] = []

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._read_header,
            "on_header_value": self._read_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._read_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def require_size(self, num_bytes: int) -> None:
        """Raises HTTPException 413 if that is more than a form with its file may have."""
        if num_bytes > self._max_bytes + _MAX_OVERHEAD_BYTES:
            raise _too_large(self._max_bytes)

    def require_overhead(self, num_bytes: int) -> None:
        """Raises HTTPException 413 if too many of the ``num_bytes`` that were parsed are not the
        file's: parsing these takes far longer."""
        if num_bytes - self._num_bytes > _MAX_OVERHEAD_BYTES:
            raise HTTPException(
                413, f"The form has more than {_MAX_OVERHEAD_BYTES} bytes besides its file."
            )

    def arrived(self) -> list[tuple[str, bytes]]:
        """The name and the bytes of the file that have arrived since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def _begin_part(self) -> None:
        self._headers, self._num_header_bytes = {}, 0
        self._num_parts += 1
        if self._num_parts > _MAX_FIELDS + 1:  # the file is one
            raise InvalidRequest(f"The form has more than {_MAX_FIELDS} fields.")

    def _read_header(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header += data[start:end]

    def _read_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._value += data[start:end]

    def _count_header(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > _MAX_HEADER_BYTES:
            raise InvalidRequest("The headers of a part of the form are too long.")

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        self._part = _Part(name, None if filename is None else filename.decode(errors="replace"))
        if name != self._name:
            return
        if self._part.filename is None or self.has_file:
            raise InvalidRequest(f"{name}: expected one file.", param=name)
        self.has_file = True
        self._arrived.append((self._part.filename, b""))

    def _read_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        if part.name == self._name and part.filename is not None:
            self._num_bytes += end - start
            if self._num_bytes > self._max_bytes:
                raise _too_large(self._max_bytes)
            self._arrived.append((part.filename, data[start:end]))
            return
        part.value += data[start:end]
        if len(part.value) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"{part.name[:64]}: too long.", param=part.name[:64])

    def _end_part(self) -> None:
        if self._part.name != self._name:
            self.fields[self._part.name] = self._part.value.decode(errors="replace")

    def _end(self) -> None:
        self.is_ended = True


def _invalid(error: FormParserError) -> InvalidRequest:
    return InvalidRequest(f"The form is not valid: {error}")


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"The file exceeds {max_bytes} bytes.")

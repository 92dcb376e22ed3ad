"""Locates the tensors of a GGUF file.

`gguf.GGUFReader` can do this too, but creates several arrays for each string, which takes six
seconds for a vocabulary of 49,000 tokens. This parser skips what is not needed. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from shared.errors import StartupError

_MAGIC = int.from_bytes(b"GGUF", "little")
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: ``shape`` in torch's order, ``kind`` a ``ggml_type``, ``start`` an offset in the
    file."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a file; ``architecture`` is llama.cpp's name of the model family."""

    architecture: str
    tensors: dict[str, GgufTensor]


def end_of(tensor: GgufTensor) -> int:
    """Where a tensor ends in the file; its start if its format is unknown."""
    from gguf.constants import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    num_weights, num_bytes = sizes.get(tensor.kind, (1, 0))
    return tensor.start + math.prod(tensor.shape) // num_weights * num_bytes


def read_header(path: Path) -> GgufHeader:
    """Read the header. Raises `StartupError` unless this is a complete GGUF file of version 2 or
    3."""
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _read(_Cursor(content))
        except (struct.error, KeyError, ValueError, ArithmeticError) as error:
            raise StartupError(
                f"{path.name} is not a readable GGUF file: {error}; download it again"
            ) from None


def _read(cursor: "_Cursor") -> GgufHeader:
    magic, version, num_tensors, num_entries = cursor.integers("<IIQQ")
    if magic != _MAGIC or version not in (2, 3):
        raise ValueError(f"begins with {magic:#x}, version {version}")
    entries = {cursor.string(): cursor.value() for _ in range(num_entries)}
    tensors = {cursor.string(): cursor.tensor() for _ in range(num_tensors)}
    alignment = int(entries.get("general.alignment") or 32)
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(
        str(entries["general.architecture"]),
        {name: GgufTensor(t.shape, t.kind, start + t.start) for name, t in tensors.items()},
    )


class _Cursor:
    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.position = 0

    def integers(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self._content, self.position)
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.integers("<Q")
        self.position += length
        return self._content[self.position - length : self.position].decode()

    def tensor(self) -> GgufTensor:
        """Parse a tensor's entry; ``start`` is relative to the tensor data."""
        (num_dimensions,) = self.integers("<I")
        *shape, kind, start = self.integers(f"<{num_dimensions}QIQ")
        return GgufTensor(tuple(reversed(shape)), kind, start)

    def value(self) -> str | int | None:
        """The next value if it is a string or an unsigned integer of 32 bits, otherwise None."""
        (kind,) = self.integers("<I")
        if kind == _STRING:
            return self.string()
        if kind == _UINT32:
            return self.integers("<I")[0]
        element, count = self.integers("<IQ") if kind == _ARRAY else (kind, 1)
        self._skip(element, count)
        return None

    def _skip(self, kind: int, count: int) -> None:
        if kind == _ARRAY:
            raise ValueError("arrays of arrays are not supported")
        if kind != _STRING:
            self.position += _SCALAR_BYTES[kind] * count
            return
        for _ in range(count):
            (length,) = self.integers("<Q")
            self.position += length

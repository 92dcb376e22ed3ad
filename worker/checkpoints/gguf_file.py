"""Locates the tensors of a GGUF file.

`gguf.GGUFReader` can do this too, but creates several arrays for each string, which takes six
seconds for a vocabulary of 49,000 tokens. This parser skips all other data. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from shared.errors import StartupError

_MAGIC = int.from_bytes(b"GGUF", "little")
_FILES = "gguf-files.json"
_LAYOUTS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The layouts of numbers, by their kind, for `struct`."""
_STRING, _ARRAY = 8, 9
_MAX_NUMBERS = 4096
"""Longer arrays describe tokens rather than layers, and are skipped."""
_MAX_KEPT = 64
"""Headers that are kept: a start asks for the same header several times, and a long vocabulary
takes a while to pass over."""
GgufValue: TypeAlias = str | float | tuple[float, ...]
"""A string, a number or a truth value, or several numbers."""


class Kind(NamedTuple):
    """A ``ggml_type``: how the elements of a tensor are stored."""

    name: str
    num_weights: int
    """Weights of a block."""
    num_bytes: int
    """Bytes of a block."""


KINDS: Mapping[int, Kind] = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("q4_0", 32, 18),
    3: Kind("q4_1", 32, 20),
    6: Kind("q5_0", 32, 22),
    7: Kind("q5_1", 32, 24),
    8: Kind("q8_0", 32, 34),
    9: Kind("q8_1", 32, 40),
    10: Kind("q2_k", 256, 84),
    11: Kind("q3_k", 256, 110),
    12: Kind("q4_k", 256, 144),
    13: Kind("q5_k", 256, 176),
    14: Kind("q6_k", 256, 210),
    15: Kind("q8_k", 256, 292),
    16: Kind("iq2_xxs", 256, 66),
    17: Kind("iq2_xs", 256, 74),
    18: Kind("iq3_xxs", 256, 98),
    19: Kind("iq1_s", 256, 50),
    20: Kind("iq4_nl", 32, 18),
    21: Kind("iq3_s", 256, 110),
    22: Kind("iq2_s", 256, 82),
    23: Kind("iq4_xs", 256, 136),
    24: Kind("I8", 1, 1),
    25: Kind("I16", 1, 2),
    26: Kind("I32", 1, 4),
    27: Kind("I64", 1, 8),
    28: Kind("F64", 1, 8),
    29: Kind("iq1_m", 256, 56),
    30: Kind("BF16", 1, 2),
    34: Kind("tq1_0", 256, 54),
    35: Kind("tq2_0", 256, 66),
    39: Kind("mxfp4", 32, 17),
    40: Kind("nvfp4", 64, 36),
    41: Kind("q1_0", 128, 18),
}
"""The types by their number in ggml's ``enum ggml_type``. `gguf.constants` has them, too, but its
import takes longer than everything else that a start does with a header."""


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
    entries: dict[str, GgufValue]
    """Everything but arrays of strings, and arrays of numbers for tokens."""
    tensors: dict[str, GgufTensor]
    start: int
    """Where the tensors begin in the file."""


def end_of(tensor: GgufTensor) -> int:
    """Where a tensor ends in the file; its start if its format is unknown."""
    if (kind := KINDS.get(tensor.kind)) is None:
        return tensor.start
    return tensor.start + math.prod(tensor.shape) // kind.num_weights * kind.num_bytes


def parts_of(path: Path) -> list[Path]:
    """The files of a model that ``path`` is a part of, the first part first.

    Raises `StartupError` if a file is missing, or is not named as llama.cpp names it.
    """
    count = read_header(path).entries.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return [path]
    match = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", path.name)
    if match is None:
        raise StartupError(
            f"{path.name} is a part of {count}, but is not named NAME-00001-of-{count:05}.gguf"
        )
    parts = [path.with_name(f"{match[1]}{part:05}{match[2]}") for part in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise StartupError(f"{path.name} is incomplete without {', '.join(missing)}")
    return parts


def write_file_list(directory: Path, files: Sequence[Path]) -> None:
    """Note the files whose weights a directory with a configuration and a tokenizer describes."""
    (directory / _FILES).write_text(json.dumps([str(path.absolute()) for path in files]))


def gguf_files(directory: Path) -> list[Path]:
    """The GGUF files of a directory: the files that it lists, or else the files in it.

    Raises `StartupError` if a listed file is gone.
    """
    listed = directory / _FILES
    if not listed.exists():
        return sorted(directory.glob("*.gguf"))
    files = [Path(name) for name in json.loads(listed.read_text())]
    if missing := [path for path in files if not path.is_file()]:
        raise StartupError(f"there is no file {missing[0]}")
    return files


def read_header(path: Path) -> GgufHeader:
    """Read the header. Raises `StartupError` unless this is a complete GGUF file of version 2 or
    3."""
    state = path.stat()
    return _read_header(path, state.st_size, state.st_mtime_ns)


@lru_cache(_MAX_KEPT)
def _read_header(path: Path, _size: int, _changed_at: int) -> GgufHeader:
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
    alignment = entries.get("general.alignment")
    alignment = int(32 if alignment is None or isinstance(alignment, tuple) else alignment)
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(
        str(entries["general.architecture"]),
        {name: value for name, value in entries.items() if value is not None},
        {name: GgufTensor(t.shape, t.kind, start + t.start) for name, t in tensors.items()},
        start,
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

    def value(self) -> GgufValue | None:
        """The next value; None for arrays of strings and for long arrays."""
        (kind,) = self.integers("<I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0]
        element, count = self.integers("<IQ")
        if element == _ARRAY:
            raise ValueError("arrays of arrays are not supported")
        if element == _STRING:
            self._pass_over_strings(count)
            return None
        if count <= _MAX_NUMBERS:
            return self._numbers(element, count)
        self.position += struct.calcsize(_LAYOUTS[element]) * count
        return None

    def _pass_over_strings(self, count: int) -> None:
        """A vocabulary has hundreds of thousands of strings, so nothing else is done with each."""
        content, position = self._content, self.position
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            position += 8 + length_at(content, position)[0]
        self.position = position

    def _numbers(self, kind: int, count: int) -> tuple[float, ...]:
        layout = f"<{count}{_LAYOUTS[kind]}"
        numbers: tuple[float, ...] = struct.unpack_from(layout, self._content, self.position)
        self.position += struct.calcsize(layout)
        return numbers

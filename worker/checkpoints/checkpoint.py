"""The safetensors files of a model directory."""

import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.errors import StartupError
from shared.model_files import HEAD_BYTES, check_content, unreadable
from worker.checkpoints.progress import LoggedProgress
from worker.checkpoints.shards import shard_names

_MAX_READ = 1024
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Checkpoint:
    """Named tensors, mapped into memory; tracks which were read.

    Raises `StartupError` if the directory's safetensors are missing or corrupt.
    """

    container: ClassVar[str] = "safetensors"

    def __init__(self, directory: Path, *, has_data: bool = True) -> None:
        """Without ``has_data``, only numbers and short vectors are read, and other tensors are on
        the meta device."""
        self.directory = directory
        self._has_data = has_data
        self._files: dict[str, Any] = {}
        for path in weight_files(directory):
            opened = _open(path)
            self._files.update(dict.fromkeys(opened.keys(), opened))
        # A checkpoint saved without its head lacks the prefix of the base model. A head that was
        # stored beside it has none.
        self._prefix = "model." if "embed_tokens.weight" in self._files else ""
        self._files = {
            name if name.startswith("lm_head.") else f"{self._prefix}{name}": opened
            for name, opened in self._files.items()
        }
        self._unread = set(self._files)
        self._dtypes: dict[str, torch.dtype] = {}
        self._num_bytes = sum(path.stat().st_size for path in weight_files(directory))
        self._num_bytes_read = 0
        self._progress = LoggedProgress()

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the largest tensor, excluding words of packed bits.

        Raises `StartupError` unless it is a float of 16 or 32 bits.
        """
        slices = [self._slice(name) for name in self._files]
        floats = [view for view in slices if view.get_dtype() != "I32"]
        if not floats:
            raise StartupError("the checkpoint has no weights of a float type")
        name = max(floats, key=lambda view: math.prod(view.get_shape())).get_dtype()
        if name not in _DTYPES:
            raise StartupError(f"weights of type {name} are not supported")
        return _DTYPES[name]

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._files)

    @property
    def unread(self) -> list[str]:
        """The names of the tensors that have not been read."""
        return sorted(self._unread)

    def has(self, name: str) -> bool:
        return name in self._files

    def kind(self, name: str) -> str:
        """The name of a tensor's data type in the file, such as BF16 or I32."""
        kind: str = self._slice(name).get_dtype()
        return kind

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises `StartupError` if it is missing."""
        return tuple(self._slice(name).get_shape())

    def read(
        self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the named tensors stacked, [*shape] in total.

        Raises `StartupError` like `check_shape`.
        """
        self.check_shape(names, shape)
        parts = [self.get(name) for name in names]
        stacked = torch.empty(shape, dtype=dtype, device=device)
        num_rows = [len(part) for part in parts]
        for rows, part in zip(torch.split(stacked, num_rows), parts, strict=True):
            rows.copy_(part)
        return stacked

    def check_shape(self, names: list[str], shape: tuple[int, ...]) -> None:
        """Raise `StartupError` unless the named tensors are [*shape] if they are stacked."""
        check_stacked(names, [self.shape(name) for name in names], shape)

    def get(self, name: str) -> Tensor:
        """A tensor as stored. Raises `StartupError` if it is missing."""
        if not self._has_data and not self._is_short(name):
            self._unread.discard(name)
            return torch.empty(self.shape(name), dtype=self._dtype_of(name), device="meta")
        tensor: Tensor = self._file(name).get_tensor(self._stored(name))
        if name in self._unread:
            self._unread.discard(name)
            self._num_bytes_read += tensor.nbytes
            self._progress("weights", self._num_bytes_read, self._num_bytes)
        return tensor

    def _is_short(self, name: str) -> bool:
        shape = self.shape(name)
        return len(shape) < 2 and math.prod(shape) <= _MAX_READ

    def _dtype_of(self, name: str) -> torch.dtype:
        """The type that the library gives a tensor, which takes it milliseconds to find out."""
        kind = self.kind(name)
        if kind not in self._dtypes:
            self._dtypes[kind] = self._slice(name)[:0].dtype
        return self._dtypes[kind]

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(self._stored(name))

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise StartupError(f"the checkpoint has no tensor {name}")
        return self._files[name]

    def _stored(self, name: str) -> str:
        return name.removeprefix(self._prefix)


def check_stacked(names: list[str], shapes: list[tuple[int, ...]], shape: tuple[int, ...]) -> None:
    """Raise `StartupError` unless tensors of these shapes are [*shape] if they are stacked."""
    have = () if () in shapes else (sum(one[0] for one in shapes), *shapes[0][1:])
    if have != shape or any(one[1:] != shape[1:] for one in shapes):
        raise StartupError(f"{names[0]} has shape {have}, config.json says {shape}")


def _open(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            check_content(path, file.read(HEAD_BYTES))
    except OSError as error:  # safetensors takes any of them for a missing file
        raise unreadable(path, error) from None
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise StartupError(
            f"{path} cannot be read: {error}; it is damaged or incomplete: download it again"
        ) from None
    except (OSError, RuntimeError) as error:  # no room to map a large file
        raise StartupError(f"{path} cannot be read: {error}") from None


def weight_files(directory: Path) -> list[Path]:
    """The files that the index lists, or else ``model.safetensors``. Raises `StartupError`."""
    if names := shard_names(directory):
        # A name in an untrusted file must not lead out of the directory.
        return [directory / Path(name).name for name in names]
    single = directory / "model.safetensors"
    if not single.exists():
        raise StartupError("the model's directory has no model.safetensors")
    return [single]

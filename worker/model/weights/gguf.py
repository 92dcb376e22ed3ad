"""GGUF files as a source of tensors."""

import math
import mmap
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from kernels.quantized import BLOCKS
from shared.errors import StartupError
from worker.checkpoints.checkpoint import check_stacked
from worker.checkpoints.gguf_file import KINDS, GgufTensor, end_of, read_header
from worker.checkpoints.progress import LoggedProgress

_MAX_READ = 1024
_MAX_RESIDENT_BYTES = 256 << 20
"""So much is read before what was read is left to the system again: the process would otherwise
seem to take the memory of the file beside that of its weights."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OF_EXPERT = re.compile(r"(.*_exps)\.(\d+)(\.\w+)")
"""An expert's matrix or bias, in a tensor that holds those of all experts."""
_IN_CONFIG = re.compile(r"(?:blk\.\d+\.)?rope_(?:freqs|factors_long|factors_short)\.weight")
"""The divisors of rotary frequencies, which config.json has as parameters."""

_NORM = re.compile(r"blk\.\d+\.ffn_norm")
"""A tensor whose name has no ending in files of Falcon H1."""
_CONSTANT = re.compile(r"blk\.(\d+)\.(xielu\.\w+)")
"""A constant of a layer, which is an entry of the metadata with a number for each layer."""

_Shape: TypeAlias = tuple[int, ...]


def _in_one(shape: _Shape) -> _Shape:
    return (math.prod(shape),)


def _in_rows(shape: _Shape) -> _Shape:
    return math.prod(shape[:-1]), shape[-1]


def _as_convolution(shape: _Shape) -> _Shape:
    return math.prod(shape[:-1]), 1, shape[-1]


def _without_ones(shape: _Shape) -> _Shape:
    return tuple(length for length in shape if length > 1) or (1,)


_VIEWS: Mapping[str, Callable[[_Shape], _Shape]] = {
    "attn_k_b.weight": _in_rows,
    "attn_v_b.weight": _in_rows,
    "exp_probs_b.bias": _in_one,
    "ffn_gate_inp_shexp.weight": _in_rows,
    "shortconv.conv.weight": _as_convolution,
    "ssm_a": _without_ones,
    "ssm_conv1d.weight": _as_convolution,
    "ssm_conv1d_k.weight": _as_convolution,
    "ssm_conv1d_q.weight": _as_convolution,
    "ssm_conv1d_v.weight": _as_convolution,
    "ssm_d": _in_one,
    "ssm_norm.weight": _in_one,
}
"""The shapes of tensors that files have with other dimensions than Hugging Face's checkpoints, by
what follows the number of the layer. The elements have the same order."""


class GgufSource:
    """A `TensorSource` over the files of a model, mapped into memory, by the files' own names.

    A tensor of all experts is also there as a tensor for each: ``blk.0.ffn_up_exps.weight`` has
    the matrix ``blk.0.ffn_up_exps.3.weight``. The constants of a layer's activation are tensors
    with a single element: ``blk.0.xielu.beta``. Matrices in blocks are [outputs, blocks of a row,
    bytes of a block]. Raises `StartupError` if a file is corrupt.
    """

    container: ClassVar[str] = "GGUF"

    def __init__(self, directory: Path, files: Sequence[Path], *, has_data: bool = True) -> None:
        """Without ``has_data``, only headers, numbers and short vectors are read, and other
        tensors are on the meta device."""
        self.directory = directory
        self._has_data = has_data
        self._maps: list[mmap.mmap] = []
        self._tensors: dict[str, tuple[Tensor, GgufTensor]] = {}
        headers = [read_header(path) for path in files]
        self.architecture = headers[0].architecture
        """llama.cpp's name of the model's family."""
        self._entries = headers[0].entries
        for path, header in zip(files, headers, strict=True):
            size = path.stat().st_size
            content = self._map(path)
            if any(end_of(tensor) > size for tensor in header.tensors.values()):
                raise StartupError(f"{path.name} is truncated")
            self._tensors |= {
                f"{name}.weight" if _NORM.fullmatch(name) else name: (content, tensor)
                for name, tensor in header.tensors.items()
                if not _IN_CONFIG.fullmatch(name)
            }
        self._read: set[str] = set()
        self._num_bytes = sum(path.stat().st_size for path in files)
        self._num_bytes_read = 0
        self._num_bytes_resident = 0
        self._progress = LoggedProgress()

    @property
    def dtype(self) -> torch.dtype:
        """The type of the file's matrices; bfloat16 if they are quantized."""
        kinds = {self.kind(name) for name in self._tensors if len(self.shape(name)) > 1}
        if kinds <= {"F32"}:
            return torch.float32
        return torch.float16 if kinds <= {"F32", "F16"} else torch.bfloat16

    @property
    def main_kind(self) -> str:
        """How most matrices of layers are stored."""
        matrices = [n for n in self._tensors if n.startswith("blk.") and len(self.shape(n)) > 1]
        ((kind, _),) = Counter(self.kind(name) for name in matrices).most_common(1) or [("", 0)]
        return kind

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    @property
    def unread(self) -> list[str]:
        return sorted(set(self._tensors) - {_of_all(name) for name in self._read})

    def has(self, name: str) -> bool:
        return _of_all(name) in self._tensors

    def kind(self, name: str) -> str:
        number = self._stored(name)[1].kind
        return KINDS[number].name if number in KINDS else f"type {number}"

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._stored(name)[1].shape
        if (found := _OF_EXPERT.fullmatch(name)) is not None:
            if int(found[2]) >= shape[0]:
                raise StartupError(f"{_of_all(name)} has {shape[0]} experts, config.json says more")
            return shape[1:]
        view = _VIEWS.get(re.sub(r"^blk\.\d+\.", "", name))
        return shape if view is None else view(shape)

    def get(self, name: str) -> Tensor:
        if (constant := _CONSTANT.fullmatch(name)) is not None:
            return self._constant(int(constant[1]), constant[2])
        content, tensor = self._stored(name)
        kind, shape, start = self.kind(name), self.shape(name), tensor.start
        if kind not in BLOCKS and kind not in _FLOATS:
            raise StartupError(f"{name} is stored as {kind}, which is not supported")
        num_bytes = end_of(tensor) - start
        if (found := _OF_EXPERT.fullmatch(name)) is not None:
            num_bytes //= tensor.shape[0]
            start += int(found[2]) * num_bytes
        held = content[start : start + num_bytes]
        if not self._has_data and math.prod(shape) > _MAX_READ:
            held = held.to("meta")
        if kind in _FLOATS:
            values = held.view(_FLOATS[kind]).view(shape)
        else:
            size = BLOCKS[kind]
            if shape[-1] % size.inputs:
                raise StartupError(
                    f"{name} has {shape[-1]} inputs, {kind} has a multiple of {size.inputs}"
                )
            values = held.view(*shape[:-1], shape[-1] // size.inputs, size.num_bytes)
        self._note_resident(held.nbytes)
        if name not in self._read:
            self._read.add(name)
            self._num_bytes_read += held.nbytes
            self._progress("weights", self._num_bytes_read, self._num_bytes)
        return values

    def _map(self, path: Path) -> Tensor:
        """The bytes of a file.

        They are mapped, so that only the requested parts are read, and private, because torch needs
        write access.
        """
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._maps.append(content)
        return torch.frombuffer(content, dtype=torch.uint8)

    def _note_resident(self, num_bytes: int) -> None:
        """Tensors stay valid: the system maps a page again if it is read again."""
        self._num_bytes_resident += num_bytes
        if self._num_bytes_resident > _MAX_RESIDENT_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            for content in self._maps:
                content.madvise(mmap.MADV_DONTNEED)
            self._num_bytes_resident = num_bytes

    def _constant(self, layer: int, key: str) -> Tensor:
        values = self._entries.get(key)
        if not isinstance(values, tuple) or layer >= len(values):
            raise StartupError(f"the GGUF file has no {key} for layer {layer}")
        return torch.tensor(values[layer], dtype=torch.float32)

    def check_shape(self, names: list[str], shape: tuple[int, ...]) -> None:
        check_stacked(names, [self.shape(name) for name in names], shape)

    def read(
        self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if packed := [name for name in names if self.kind(name) not in _FLOATS]:
            raise StartupError(f"{packed[0]} is stored as {self.kind(packed[0])}, not as floats")
        self.check_shape(names, shape)
        return torch.cat([self.get(name).to(device, dtype) for name in names])

    def _stored(self, name: str) -> tuple[Tensor, GgufTensor]:
        """The content of a tensor's file, and the tensor there, which may hold all experts."""
        if (whole := _of_all(name)) not in self._tensors:
            raise StartupError(f"the checkpoint has no tensor {whole}")
        return self._tensors[whole]


def _of_all(name: str) -> str:
    """The name of a tensor in the file: a tensor of all experts has no number of an expert."""
    return _OF_EXPERT.sub(r"\1\3", name)

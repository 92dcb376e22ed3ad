"""GGUF files as a source of tensors, by the names of Hugging Face's checkpoints."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kernels.quantized import BLOCKS
from shared.errors import StartupError
from worker.checkpoints.checkpoint import check_stacked
from worker.checkpoints.gguf_file import KINDS, GgufTensor, end_of, read_header
from worker.checkpoints.progress import LoggedProgress

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_CONFIG = "rope_freqs.weight"
"""The divisors of rotary frequencies, which config.json has as parameters."""
_INTERLEAVED = {"llama": {"attn_q": "head_count", "attn_k": "head_count_kv"}}
"""The tensors of an architecture whose heads llama.cpp rotates by adjacent pairs, with the entries
that count these heads. Hugging Face rotates the halves of a head."""


class GgufSource:
    """A `TensorSource` over the files of a model, mapped into memory.

    Matrices in blocks are [outputs, blocks of a row, bytes of a block]. Raises `StartupError` if a
    file is corrupt.
    """

    container: ClassVar[str] = "GGUF"

    def __init__(self, directory: Path, files: Sequence[Path], *, has_data: bool = True) -> None:
        """Without ``has_data``, only headers are read, and tensors are on the meta device."""
        self.directory = directory
        self._tensors: dict[str, tuple[Tensor, str, GgufTensor]] = {}
        headers = [read_header(path) for path in files]
        self._architecture = headers[0].architecture
        self._entries = headers[0].entries
        for path, header in zip(files, headers, strict=True):
            size = path.stat().st_size
            content = _mapped(path) if has_data else _without_data(size)
            if any(end_of(tensor) > size for tensor in header.tensors.values()):
                raise StartupError(f"{path.name} is truncated")
            for name, tensor in header.tensors.items():
                if name != _IN_CONFIG:
                    self._tensors[_name(name)] = (content, name, tensor)
        self._unread = set(self._tensors)
        self._num_bytes = sum(path.stat().st_size for path in files)
        self._num_bytes_read = 0
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
        matrices = [n for n in self._tensors if ".layers." in n and len(self.shape(n)) > 1]
        ((kind, _),) = Counter(self.kind(name) for name in matrices).most_common(1) or [("", 0)]
        return kind

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    @property
    def unread(self) -> list[str]:
        return sorted(self._unread)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def kind(self, name: str) -> str:
        number = self._stored(name)[2].kind
        return KINDS.get(number, f"type {number}")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name)[2].shape

    def get(self, name: str) -> Tensor:
        content, stored_name, tensor = self._stored(name)
        kind, shape = self.kind(name), tensor.shape
        if kind not in BLOCKS and kind not in _FLOATS:
            raise StartupError(f"{stored_name} is stored as {kind}, which is not supported")
        held = content[tensor.start : end_of(tensor)]
        if kind in _FLOATS:
            values = held.view(_FLOATS[kind]).view(shape)
        else:
            size = BLOCKS[kind]
            if shape[-1] % size.inputs:
                raise StartupError(
                    f"{stored_name} has {shape[-1]} inputs, {kind} has a multiple of {size.inputs}"
                )
            values = held.view(*shape[:-1], shape[-1] // size.inputs, size.num_bytes)
        if name in self._unread:
            self._unread.discard(name)
            self._num_bytes_read += held.nbytes
            self._progress("weights", self._num_bytes_read, self._num_bytes)
        return self._in_halves(stored_name, values)

    def check_shape(self, names: list[str], shape: tuple[int, ...]) -> None:
        check_stacked(names, [self.shape(name) for name in names], shape)

    def read(
        self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if packed := [name for name in names if self.kind(name) not in _FLOATS]:
            raise StartupError(f"{packed[0]} is stored as {self.kind(packed[0])}, not as floats")
        self.check_shape(names, shape)
        return torch.cat([self.get(name).to(device, dtype) for name in names])

    def _stored(self, name: str) -> tuple[Tensor, str, GgufTensor]:
        if name not in self._tensors:
            raise StartupError(f"the checkpoint has no tensor {name}")
        return self._tensors[name]

    def _in_halves(self, stored_name: str, rows: Tensor) -> Tensor:
        """The rows in Hugging Face's order, as in transformers' ``LlamaTensorProcessor``."""
        counts = _INTERLEAVED.get(self._architecture, {})
        match = re.fullmatch(r"blk\.\d+\.(\w+)\.(?:weight|bias)", stored_name)
        if match is None or match[1] not in counts:
            return rows
        prefix = f"{self._architecture}.attention"
        num_heads = self._entries.get(f"{prefix}.{counts[match[1]]}")
        num_heads = num_heads or self._entries.get(f"{prefix}.head_count") or 0
        if not num_heads or len(rows) % (2 * num_heads):
            raise StartupError(f"{stored_name} has {len(rows)} outputs in {num_heads} heads")
        heads = torch.arange(len(rows)).view(num_heads, -1, 2)
        return rows[heads.transpose(1, 2).flatten()]


def _mapped(path: Path) -> Tensor:
    """The bytes of a file.

    They are mapped, so that only the requested parts are read, and private, because torch needs
    write access.
    """
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _without_data(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


def _name(stored: str) -> str:
    """A tensor's name in Hugging Face's checkpoints; others keep theirs."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
    if match is None:
        return stored
    layer, part, kind = match.groups()
    names: Mapping[str, str] = _TOP if layer is None else _LAYER
    if part not in names:
        return stored
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{names[part]}.{kind}"

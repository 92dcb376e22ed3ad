"""The packed matrices of a GGUF file, by the names of its conversion to safetensors."""

import math
import re
from collections import Counter
from pathlib import Path

import torch

from kernels.quantized import BLOCK_BYTES, BLOCK_INPUTS, QuantFormat, QuantizedWeight
from shared.errors import StartupError
from worker.checkpoints.gguf_file import GgufTensor, read_header

_FORMATS: dict[int, QuantFormat] = {2: "q4_0", 3: "q4_1", 8: "q8_0"}
"""The supported formats, by their number in ggml's ``enum ggml_type``."""
_TABLES = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.weight")
_LINEARS = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


class GgufWeights:
    """The matrices of one GGUF file. Raises `StartupError` if the file is corrupt."""

    def __init__(self, path: Path, head_dim: int) -> None:
        header = read_header(path)
        self._head_dim = head_dim
        self._tensors = header.tensors
        self._has_interleaved_heads = header.architecture == "llama"
        # Mapped, so that only the requested parts are read; private, because torch needs write
        # access.
        size = path.stat().st_size
        self._bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        if any(_end(tensor) > size for tensor in self._tensors.values()):
            raise StartupError(f"{path.name} is truncated")

    @property
    def main_format(self) -> QuantFormat | None:
        """The format of most linear layers; None if it is not supported."""
        kinds = Counter(
            tensor.kind
            for name, tensor in self._tensors.items()
            if name.startswith("blk.") and len(tensor.shape) > 1
        )
        (kind, _), *_ = kinds.most_common(1) or [(-1, 0)]
        return _FORMATS.get(kind)

    def get(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """The matrix of this name and shape, still backed by the file; None if there is none."""
        gguf_name = _gguf_name(name)
        tensor = self._tensors.get(gguf_name)
        if tensor is None or tensor.shape != shape or tensor.kind not in _FORMATS:
            return None
        outputs, inputs = shape
        quant_format = _FORMATS[tensor.kind]
        blocks = self._bytes[tensor.start : _end(tensor)]
        packed = QuantizedWeight(
            quant_format, blocks.view(outputs, inputs // BLOCK_INPUTS, BLOCK_BYTES[quant_format])
        )
        if self._has_interleaved_heads and re.search(r"\.attn_[qk]\.", gguf_name):
            return packed.rows(_halves(outputs, self._head_dim))
        return packed


def _gguf_name(name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return _TABLES.get(name, name)
    return f"blk.{match[1]}.{_LINEARS.get(match[2], match[2])}.weight"


def _halves(num_rows: int, head_dim: int) -> torch.Tensor:
    """The row order of a matrix: llama.cpp rotates adjacent pairs, Hugging Face the halves of a
    head.

    As in transformers' ``LlamaTensorProcessor``, which does the same to whole matrices.
    """
    heads = torch.arange(num_rows).view(-1, head_dim // 2, 2)
    return heads.transpose(1, 2).flatten()


def _end(tensor: GgufTensor) -> int:
    if tensor.kind not in _FORMATS:
        return tensor.start
    block_bytes = BLOCK_BYTES[_FORMATS[tensor.kind]]
    return tensor.start + math.prod(tensor.shape) // BLOCK_INPUTS * block_bytes

"""Where tensors come from: the protocol of a checkpoint on disk."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from worker.checkpoints.architectures import architecture_of
from worker.checkpoints.checkpoint import Checkpoint, weight_files
from worker.checkpoints.gguf_file import gguf_files, read_header
from worker.model.weights.gguf import GgufSource


class TensorSource(Protocol):
    """Named tensors on disk, by the names that they have in Hugging Face's checkpoints.

    Methods raise `StartupError` if a tensor is missing or has another shape.
    """

    @property
    def container(self) -> str:
        """safetensors or GGUF."""
        ...

    @property
    def directory(self) -> Path: ...

    @property
    def dtype(self) -> torch.dtype:
        """The data type in which the model is served unless the settings name another. Raises
        `StartupError` if there is no such type."""
        ...

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        ...

    @property
    def unread(self) -> list[str]:
        """The names of the tensors that have not been read."""
        ...

    def has(self, name: str) -> bool: ...

    def kind(self, name: str) -> str:
        """How a tensor's elements are stored, such as BF16 or I32."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in which a tensor is stored."""
        ...

    def get(self, name: str) -> Tensor:
        """A tensor as stored."""
        ...

    def check_shape(self, names: list[str], shape: tuple[int, ...]) -> None:
        """Raise `StartupError` unless the named tensors are [*shape] if they are stacked."""
        ...

    def read(
        self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The named tensors stacked, [*shape] in total."""
        ...


def stored_in(directory: Path) -> list[Path]:
    """The files of a model's weights. Raises `StartupError` if there are none."""
    is_gguf_only = not any(directory.glob("*.safetensors"))
    return (is_gguf_only and gguf_files(directory)) or weight_files(directory)


def open_source(
    directory: Path, quant_format: str | None = None, *, has_data: bool = True
) -> TensorSource:
    """The weights of a model's directory: its safetensors, or the GGUF file that it lists.

    A GGUF file beside safetensors, which these were converted from, is preferred if weights are to
    be in ``quant_format`` and most of its matrices are. Without ``has_data``, large tensors are on
    the meta device, so that names and shapes are known at once. Raises `StartupError`.
    """
    files = gguf_files(directory)
    if not files:
        return Checkpoint(directory, has_data=has_data)
    if not any(directory.glob("*.safetensors")):
        return GgufSource(directory, files, has_data=has_data)
    if quant_format is not None and architecture_of(read_header(files[0]).architecture):
        source = GgufSource(directory, files, has_data=has_data)
        if source.main_kind == quant_format:
            return source
    return Checkpoint(directory, has_data=has_data)

"""A recurrence with its weights, and the tensors that it is read from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from kernels.native.packed import PackedWeight
from kernels.native.recurrences import PackedRecurrence
from kernels.providers import Ops
from worker.model.spec import LayerNames
from worker.model.weights.weight import Linear


class LayerTensors(Protocol):
    """The tensors of a layer. Names are those of `LayerNames`.

    The methods raise `StartupError` if a tensor is missing or has another shape.
    """

    @property
    def names(self) -> LayerNames: ...

    @property
    def hidden_size(self) -> int: ...

    def linear(
        self, names: Sequence[str], shape: tuple[int, int], *, has_bias: bool = False
    ) -> Linear:
        """A matrix in the format of the checkpoint. Several names are the parts of one matrix."""
        ...

    def float_linear(
        self, names: Sequence[str], shape: tuple[int, int], *, has_bias: bool = False
    ) -> Linear:
        """A small matrix, which is expanded if the checkpoint has it packed."""
        ...

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A float32 tensor of this name in the checkpoint, with its ending."""
        ...

    def stacked_floats(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """A float32 tensor whose parts have these names, of this shape in total."""
        ...


def decay_of(tensors: LayerTensors, name: str, shape: tuple[int, ...]) -> Tensor:
    """How fast each part of a state decays, as positive numbers, float32 [*shape]."""
    stored = tensors.floats(name, shape)
    return stored.exp() if tensors.names.are_decays_logarithms else -stored


class Recurrent(ABC):
    """A recurrence with its weights."""

    @abstractmethod
    def mix(
        self, hidden: Tensor, states: Tensor, query_starts: Tensor, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """Mix the tokens of several sequences, and return the states after them.

        ``hidden`` is [num_tokens, hidden_size], as is the result. ``states``, float32 [num_seqs,
        state_size], is the state of each sequence before its first token, zeros before its start.
        ``query_starts`` [num_seqs + 1] has the first token of each sequence.
        """

    @abstractmethod
    def packed(self, pack: Callable[[Linear], PackedWeight]) -> PackedRecurrence:
        """The recurrence for the native kernels."""

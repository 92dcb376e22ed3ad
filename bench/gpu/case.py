"""A kernel with its inputs, and how little it could move and compute."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bench.gpu.figures import Work, synchronize
from kernels.providers import Ops

_COLD_BYTES = 256 << 20
"""Tensors of this many bytes together are not in the device's cache when they are used again."""
MAX_COPIES = 10

Call = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel and its inputs. ``call(ops, *tensors)`` may overwrite its tensors.

    ``num_bytes`` and ``num_flops`` are the minimum that it has to move and compute.
    """

    name: str
    call: Call
    tensors: tuple[Tensor, ...]
    written: tuple[int, ...] = ()
    """The indices of tensors that are results as well."""
    num_bytes: float
    num_flops: float = 0.0
    goal: float | None = None
    """The minimum ratio of the floor to the measured time."""
    goal_tflops: float | None = None
    """The minimum rate in TFLOP/s, instead of ``goal``."""
    library: Work | None = None
    """What torch has for the same purpose, with inputs of the same size."""

    def results(self, ops: Ops) -> list[Tensor]:
        """Run on copies of the tensors and return the results."""
        tensors = [tensor.clone() for tensor in self.tensors]
        # A kernel may read a weight before the kernels that still run end.
        synchronize(tensors[0].device)
        returned = self.call(ops, *tensors)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        return [*outputs, *(tensors[index] for index in self.written)]

    def cold(self, ops: Ops) -> Work:
        """Run on other copies of the tensors each time, so that none is in the device's cache."""
        num_bytes = sum(tensor.nbytes for tensor in self.tensors)
        num_copies = min(MAX_COPIES, math.ceil(_COLD_BYTES / num_bytes))
        copies = itertools.cycle(
            [tuple(tensor.clone() for tensor in self.tensors) for _ in range(num_copies)]
        )
        return lambda: self.call(ops, *next(copies))

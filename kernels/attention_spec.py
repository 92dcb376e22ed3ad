"""What the attention of a layer computes, for the kernels of all providers."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec:
    """The constants of a layer's attention.

    A token attends to the tokens of its sequence up to itself, with a ``window`` of w to the last w
    of them, with a ``chunk`` of c to the tokens of its own chunk: positions k * c to (k + 1) * c -
    1. Scores are products of queries and keys times ``scale``, then ``softcap * tanh(score /
    softcap)``. With ``slopes``, [num_heads] float32, the scores of a head then fall by its slope
    for each token of distance (ALiBi, Press et al., arXiv:2108.12409). ``sinks`` are [num_heads]
    float32 scores that take part in each softmax, but belong to no token. A ``value_dim`` says that
    values are the first elements of keys, so many of them, as in attention over latent vectors.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    value_dim: int | None = None

    def first_visible(self, position: int) -> int:
        """The first position to which the token at ``position`` attends."""
        first = 0 if self.window is None else max(0, position + 1 - self.window)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

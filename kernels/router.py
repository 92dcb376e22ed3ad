"""How the experts of a token follow from its scores, for the kernels of all providers."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

RouterScores: TypeAlias = Literal["softmax", "sigmoid", "softmax of chosen", "sparse mixer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The choice of ``top_k`` experts, and of their weights."""

    top_k: int
    scores: RouterScores
    """The scores that are made of the router's outputs: probabilities of all experts, or of the
    chosen experts alone, or a sigmoid of each. With the sparse mixer, experts are chosen in turn,
    and the weight of each is its probability among the experts left whose scores are close to its
    own."""
    spread: float = 0.0
    """How far below the best score, relative to the larger of both, a score is close to it."""
    is_normalized: bool = False
    """Whether the weights of the chosen experts add up to 1."""
    scale: float = 1.0
    """The factor that multiplies the weights."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Experts are chosen in these groups of experts alone: the groups with the highest best score,
    or, for sigmoids, with the highest sum of the two best scores."""
    has_bias: bool = False
    has_correction: bool = False
    """Whether a number is added to each score for the choice of experts, but not for weights."""
    has_factors: bool = False
    """Whether the weight of each expert is multiplied with a number of its own."""
    weighs_inputs: bool = False
    """Whether the inputs of experts are multiplied with the weights, rather than their outputs."""

"""How the experts of a token follow from its scores, for the kernels of all providers."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Scores: TypeAlias = Literal["softmax", "sigmoid", "softmax of chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The choice of ``top_k`` experts, and of their weights."""

    top_k: int
    scores: Scores
    """What is made of the router's outputs: probabilities of all experts, or of the chosen experts
    alone, or a sigmoid of each."""
    is_normalized: bool = False
    """Whether the weights of the chosen experts add up to one."""
    scale: float = 1.0
    """What the weights are multiplied with."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Experts are chosen in these groups of experts alone: those whose best score is the highest,
    or, for sigmoids, the sum of whose two best scores is."""
    has_bias: bool = False
    has_correction: bool = False
    """Whether a number is added to each score for the choice of experts, but not for weights."""
    weighs_inputs: bool = False
    """Whether the inputs of experts are multiplied with the weights, rather than their outputs."""

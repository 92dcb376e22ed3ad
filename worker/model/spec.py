"""What a model computes, as data: a family's file makes a `ModelSpec` from a configuration, and the
decoders execute it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kernels.router import Router

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]
"""The function of a feed-forward part. ``clamped_swiglu`` is that of gpt-oss: the gate is at most
7, its sigmoid is steeper, and one is added to the other half, which is between -7 and 7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalization of rows: by their root mean square, or by mean and variance ("layer")."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    adds_one: bool = False
    """Whether the checkpoint holds the weights minus one."""
    has_weight: bool = True
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions."""

    parameters: Mapping[str, Any]
    """``rope_theta``, ``rope_type`` and the parameters of that type."""
    dim: int
    """The number of a head's elements that are rotated: the first elements."""
    is_interleaved: bool = False
    """Whether adjacent elements are rotated together, rather than an element of the first half with
    one of the second half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """The normalization of queries and keys."""

    norm: Norm
    over: Literal["head", "all heads"] = "head"
    is_after_rope: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Queries grow with their position p by 1 + scale * log(1 + floor((p + shift) / length))."""

    scale: float
    length: float
    shift: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal attention whose query heads share key heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    """None: the layer does not see positions."""
    window: int | None = None
    """The number of tokens that a token attends to, including itself; None: all."""
    chunk: int | None = None
    """A token attends only to the tokens of its own chunk of so many positions."""
    softcap: float | None = None
    has_sinks: bool = False
    """Whether each head has a score that takes part in the softmax and belongs to no token."""
    qk_norm: QkNorm | None = None
    value_norm: Norm | None = None
    temperature: Temperature | None = None
    values_are_keys: bool = False
    """Whether values are made with the matrix of keys, which has no norm and no positions then."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False

    @property
    def attended_size(self) -> int:
        """The length of all heads' results."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """The length of all heads' keys."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Two products with an activation in between."""

    size: int
    activation: Activation = "silu"
    is_gated: bool = True
    """Whether the activation of one half is multiplied with another half."""
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: each token is computed by a few of them."""

    count: int
    expert: Mlp
    router: Router
    shared: Mlp | None = None
    """An expert that computes all tokens."""
    has_shared_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Attention and a feed-forward part. A norm is None where the family has none."""

    attention: Attention
    feed_forward: Mlp | Experts
    before_attention: Norm | None
    after_attention: Norm | None = None
    before_feed_forward: Norm | None = None
    after_feed_forward: Norm | None = None
    is_parallel: bool = False
    """Whether both parts have the same input."""
    multiplier: float = 1.0
    """What the results of both parts are multiplied with before they are added."""
    has_scalar: bool = False
    """Whether the layer's result is multiplied with a number of the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """The names of one layer's tensors in a checkpoint, after the name of the layer.

    Several names stand for the parts of one matrix. A name of experts with ``{}`` is that of each
    expert; without, the tensor holds the matrices of all.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    before_attention: str = "input_layernorm"
    after_attention: str = "post_attention_layernorm"
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str = "post_feedforward_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    are_experts_transposed: bool = False
    """Whether stacked matrices of experts are [inputs, outputs]."""
    are_gates_interleaved: bool = False
    """Whether the rows of gate and other half alternate in the matrices of experts."""
    shared_gate_up: tuple[str, ...] = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
    )
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    scalar: str = "layer_scalar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of a model's tensors in a checkpoint."""

    layers: LayerNames = field(default_factory=LayerNames)
    prefixes: tuple[str, ...] = ("model.",)
    """What the names of the language model's tensors may begin with; the first that fits counts.
    Everything else in the checkpoint, such as a tower for images, is not read."""
    final_norm: str = "norm"
    heads: tuple[str, ...] = ("lm_head",)
    has_further_layers: bool = False
    """Whether the checkpoint may have layers after those of the model, which predict several tokens
    at once and are not read."""
    further_parts: tuple[str, ...] = ()
    """What the names of other tensors begin with, after the prefix, that are not read for the same
    reason."""
    is_within: bool = False
    """Whether the checkpoint also holds other models, whose tensors are not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole decoder."""

    vocab_size: int
    hidden_size: int
    max_seq_len: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    has_tied_embeddings: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    names: Names = field(default_factory=Names)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """The heads of the layer whose keys take most room in the cache."""
        return self._largest.num_kv_heads

    @property
    def head_dim(self) -> int:
        """The length of the heads of the layer whose keys take most room in the cache."""
        return self._largest.head_dim

    @property
    def _largest(self) -> Attention:
        shapes = (layer.attention for layer in self.layers)
        return max(shapes, key=lambda shape: shape.key_size)

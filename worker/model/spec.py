"""What a model computes, as data: a family's file makes a `ModelSpec` from a configuration, and the
decoders execute it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, TypeAlias

from kernels.router import Router

Activation: TypeAlias = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu", "xielu"
]
"""The function of a feed-forward part. ``clamped_swiglu`` is the function of gpt-oss: the gate is
at most 7, its sigmoid is steeper, and 1 is added to the other half, which is between -7 and 7.
``xielu`` has constants that each layer has learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalization of rows: by their root mean square, or by mean and variance ("layer")."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    adds_one: bool = False
    """Whether the checkpoint holds the weights minus 1."""
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
    an element of the second half."""


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
class Latent:
    """Keys and values that are made from one short vector of each token (DeepSeek-AI,
    arXiv:2405.04434), beside a rotary key that all heads share.

    The cache holds the vector and the rotary key: one key head, whose length is the sum of both.
    """

    rank: int
    """The length of the vector."""
    key_dim: int
    """The number of elements of a head's keys that are made from the vector."""
    value_dim: int
    query_rank: int | None
    """The length of the vector that all queries are made from; None: the hidden state."""
    norm: Norm
    """Of both vectors."""


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
    slopes: tuple[float, ...] | None = None
    """By how much each head's scores fall for each token of distance (ALiBi, Press et al.,
    arXiv:2108.12409); None: they do not."""
    has_sinks: bool = False
    """Whether each head has a score that takes part in the softmax and belongs to no token."""
    qk_norm: QkNorm | None = None
    value_norm: Norm | None = None
    temperature: Temperature | None = None
    values_are_keys: bool = False
    """Whether values are made with the matrix of keys, which has no norm and no positions then."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    latent: Latent | None = None
    has_gate: bool = False
    """Whether each result is multiplied with the sigmoid of a number that is made like queries."""
    kv_from: int | None = None
    """The earlier layer whose keys and values this layer reads; None: it makes its own."""

    @property
    def attended_size(self) -> int:
        """The length of all heads' results."""
        value_dim = self.head_dim if self.latent is None else self.latent.value_dim
        return self.num_heads * value_dim

    @property
    def rotated_dim(self) -> int:
        """The length of the vectors that are rotated."""
        return self.head_dim if self.latent is None else self.head_dim - self.latent.rank

    @property
    def key_size(self) -> int:
        """The length of all heads' keys."""
        return self.num_kv_heads * self.head_dim

    @property
    def query_size(self) -> int:
        """The length of all heads' queries."""
        key_dim = 0 if self.latent is None else self.latent.key_dim
        return self.num_heads * (key_dim + self.rotated_dim)

    @property
    def qkv_size(self) -> int:
        """The length of everything that is made from the hidden state."""
        if self.kv_from is not None:
            return self.query_size
        if self.latent is None:
            num_query_heads = self.num_heads * (2 if self.has_gate else 1)
            return (num_query_heads + 2 * self.num_kv_heads) * self.head_dim
        return (self.latent.query_rank or self.query_size) + self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """A causal convolution of each channel, between two gates: a product of the hidden state has
    three parts, the convolution's input is the first times the third, and its result is multiplied
    with the second."""

    size: int
    """The number of channels."""
    num_taps: int
    """The number of tokens that a token's result depends on, including itself."""
    has_bias: bool = False

    @property
    def state_size(self) -> int:
        """The number of floats of a state: the inputs of the last tokens, [num_taps - 1, size]."""
        return (self.num_taps - 1) * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Linear attention by the gated delta rule (Yang et al., arXiv:2412.06464).

    Queries, keys and values go through a convolution and SiLU, and queries and keys of each head
    then have the length 1. The state of a head is a matrix that maps keys to values: each token
    lets a part of it fade, and corrects the value of its own key. What the matrix then has for the
    query is normalized, and multiplied with the SiLU of a gate.
    """

    num_heads: int
    """The number of heads of values."""
    num_key_heads: int
    """The number of heads of queries, and of keys, which several heads of values share."""
    key_dim: int
    value_dim: int
    num_taps: int
    """The number of tokens of the convolution."""
    norm: Norm
    """Of each head's result."""
    greatest_strength: float = 1.0
    """The greatest part of a correction that is made. Above 1, a state can take the other sign
    (Grazzi et al., arXiv:2411.12537)."""

    @property
    def keys_size(self) -> int:
        """The length of all heads' keys."""
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        """The length of all heads' values."""
        return self.num_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """The number of channels of the convolution."""
        return 2 * self.keys_size + self.values_size

    @property
    def state_size(self) -> int:
        """The number of floats of a state: the inputs of the convolution, [num_taps - 1,
        mixed_size], then the matrices of all heads."""
        return (self.num_taps - 1) * self.mixed_size + self.values_size * self.key_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta:
    """Linear attention by a gated delta rule that lets each element of a key fade at a rate of its
    own (Kimi Team, arXiv:2510.26692). Queries, keys and values have heads of the same number and
    length, which go through a convolution and SiLU. Two short vectors of each token make these
    rates, and the gates, whose sigmoid multiplies the normalized results."""

    num_heads: int
    head_dim: int
    rank: int
    """The length of the short vectors."""
    num_taps: int
    """The number of tokens of the convolution."""
    norm: Norm
    """Of each head's result."""

    @property
    def size(self) -> int:
        """The length of all heads' queries, keys, or values."""
        return self.num_heads * self.head_dim

    @property
    def kept_size(self) -> int:
        """The number of floats of the convolution's state, with which a state begins."""
        return (self.num_taps - 1) * 3 * self.size

    @property
    def state_size(self) -> int:
        """The number of floats of a state: after the convolution's, the matrices of all heads."""
        return self.kept_size + self.size * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A state space of several heads (Dao and Gu, arXiv:2405.21060). A product of the hidden state
    makes the gates of the results, then the inputs of the heads and the vectors that write and read
    the state, which a short convolution and a SiLU follow, then the step of each head."""

    num_heads: int
    head_dim: int
    state_dim: int
    """The number of floats that are kept of each element of a head."""
    num_groups: int
    """The heads of a group share the vectors that write and read."""
    num_taps: int
    """The number of tokens of the convolution."""
    norm: Norm | None
    """The norm of each group's results; None: results are only gated."""
    is_gated_last: bool = False
    """Whether the gate follows the norm, rather than the norm the gate."""
    least_step: float = 0.0
    greatest_step: float = inf
    has_bias: bool = False
    has_output_bias: bool = False
    has_convolution_bias: bool = True
    factors: tuple[float, float, float, float, float] | None = None
    """Of what the product makes: gates, inputs, writes, reads and steps."""

    @property
    def size(self) -> int:
        """The length of all heads' inputs, and of their results."""
        return self.num_heads * self.head_dim

    @property
    def convolved_size(self) -> int:
        """The number of channels of the convolution."""
        return self.size + 2 * self.num_groups * self.state_dim

    @property
    def made_sizes(self) -> tuple[int, int, int, int, int]:
        """The lengths of what the product makes."""
        of_groups = self.num_groups * self.state_dim
        return self.size, self.size, of_groups, of_groups, self.num_heads

    @property
    def kept_size(self) -> int:
        """The number of floats of the convolution's state, with which a state begins."""
        return (self.num_taps - 1) * self.convolved_size

    @property
    def state_size(self) -> int:
        """The number of floats of a state."""
        return self.kept_size + self.size * self.state_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """A state space of single channels (Gu and Dao, arXiv:2312.00752). A product of the hidden
    state makes the inputs of all channels, which a short convolution and a SiLU follow, and the
    gates of the results. A product of these inputs makes the vectors that write and read the
    states, and a short vector, from which another product makes the step of each channel."""

    size: int
    """The number of channels."""
    state_dim: int
    """The number of floats that are kept of each channel."""
    rank: int
    """The length of the short vector."""
    num_taps: int
    """The number of tokens of the convolution."""
    norm: Norm | None
    """The norm of the short vector, and of the vectors that write and read."""
    has_bias: bool = False
    has_convolution_bias: bool = True

    @property
    def part_sizes(self) -> list[int]:
        """The lengths of the short vector, and of the vectors that write and read."""
        return [self.rank, self.state_dim, self.state_dim]

    @property
    def kept_size(self) -> int:
        """The number of floats of the convolution's state, with which a state begins."""
        return (self.num_taps - 1) * self.size

    @property
    def state_size(self) -> int:
        """The number of floats of a state."""
        return self.kept_size + self.size * self.state_dim


_STATE_PARTS = 64
"""Without attention, a token's place in a block has the size of such a part of the longest state,
so that several pieces of a block hold a state, with little room left, whatever the block size."""
_HEAD_STEP = 16
"""The native kernels' heads are of a multiple of this length."""

Recurrence: TypeAlias = ShortConv | DeltaNet | KimiDelta | Mamba2 | Mamba
"""A mixer whose state replaces all tokens before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Two products with an activation in between."""

    size: int
    activation: Activation = "silu"
    is_gated: bool = True
    """Whether the activation of one half is multiplied with the other half."""
    has_bias: bool = False
    gate_multiplier: float = 1.0
    """The factor of the gate before the activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: each token is computed by a few of them."""

    count: int
    expert: Mlp
    router: Router
    shared: Mlp | None = None
    """An expert that computes all tokens."""
    has_shared_gate: bool = False
    latent_size: int | None = None
    """If there is a size, experts compute vectors of this length: a product makes them of the
    hidden state, which router and shared expert read, and another product makes the experts' sum as
    long as the hidden state."""
    has_latent_bias: bool = False
    own_norm: Norm | None = None
    """If there is one, router and experts do not read what the shared expert reads: each has a norm
    of its own for the layer's sum, and so have the results of the experts and of the shared
    expert before they are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """The factors that multiply the results of a layer's parts before they are added."""

    attention: float = 1.0
    recurrence: float = 1.0
    feed_forward: float = 1.0

    @classmethod
    def same(cls, factor: float) -> "Multipliers":
        return cls(attention=factor, recurrence=factor, feed_forward=factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Attention, or a recurrence in its place, or both side by side with the same input, and a
    feed-forward part. A layer may consist of one part alone. A norm is None where the family has
    none; a recurrence has the norms of attention."""

    attention: Attention | None = None
    recurrence: Recurrence | None = None
    feed_forward: Mlp | Experts | None = None
    before_attention: Norm | None = None
    after_attention: Norm | None = None
    before_feed_forward: Norm | None = None
    after_feed_forward: Norm | None = None
    is_parallel: bool = False
    """Whether both parts have the same input."""
    multipliers: Multipliers = Multipliers()
    has_scalar: bool = False
    """Whether the layer's result is multiplied with a number of the checkpoint."""

    @property
    def has_mixer(self) -> bool:
        """Whether tokens are mixed with the tokens before them."""
        return self.attention is not None or self.recurrence is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """A short vector of each token for each layer, from a table and from the token's embedding. At
    the end of a layer it multiplies a gate of the layer's result, and their product, expanded and
    normalized, is added."""

    size: int
    """The length of the vector."""
    vocab_size: int
    """The number of rows of the table."""
    activation: Activation
    """The activation of the gate."""
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentNames:
    """The names of the tensors of attention over latent vectors, after the name of the layer."""

    query: str = "self_attn.q_proj"
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    down: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    up: str = "self_attn.kv_b_proj"
    keys: str | None = None
    """What makes latent vectors into keys, where it is stored apart from ``up``, and transposed."""
    values: str | None = None
    """What makes latent vectors into values, where it is stored apart from ``up``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNames:
    """The names of the tensors of a `DeltaNet` or a `KimiDelta`, after the name of the layer."""

    inputs: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    """Queries, keys, values and gates; a single matrix has the parts of each key head together."""
    rates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    """How much a token corrects, and how much fades; a single matrix is divided like ``inputs``."""
    fading: str = "linear_attn.f_b_proj"
    gates: str = "linear_attn.g_b_proj"
    convolution: tuple[str, ...] = ("linear_attn.conv1d",)
    """Of queries, keys and values, together or each alone."""
    decay: str = "linear_attn.A_log"
    decay_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    output: str = "linear_attn.out_proj"
    num_tiled_keys: int | None = None
    """The number of stored heads of keys, where each belongs to every so-manieth head of values,
    and the decoder has keys for each head of values."""
    has_flat_decay: bool = False
    """Whether the decay of a `KimiDelta` is [num_heads], rather than [1, 1, num_heads, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceNames:
    """The names of the tensors of a `Mamba` or a `Mamba2`, after the name of the layer."""

    input: str
    convolution: str
    parts: str
    steps: str
    step_bias: str
    decay: str
    skips: str
    norm: str
    part_norms: tuple[str, str, str]
    output: str

    @classmethod
    def within(cls, module: str) -> "StateSpaceNames":
        """The names of the parts of a module."""
        return cls(
            input=f"{module}.in_proj",
            convolution=f"{module}.conv1d",
            parts=f"{module}.x_proj",
            steps=f"{module}.dt_proj",
            step_bias=f"{module}.dt_bias",
            decay=f"{module}.A_log",
            skips=f"{module}.D",
            norm=f"{module}.norm",
            part_norms=(
                f"{module}.dt_layernorm",
                f"{module}.b_layernorm",
                f"{module}.c_layernorm",
            ),
            output=f"{module}.out_proj",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """The names of a layer's tensors in a checkpoint, after the name of the layer.

    Several names stand for the parts of a single matrix. A name of experts with ``{}`` names the
    tensor of each expert; without, the tensor holds the matrices of all.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    are_heads_together: bool = False
    """Whether a single matrix has, for each key head, the queries that share the key, the key, and
    the value."""
    attention_output: str = "self_attn.o_proj"
    convolution_input: str = "conv.in_proj"
    convolution: str = "conv.conv"
    convolution_output: str = "conv.out_proj"
    state_space: StateSpaceNames = field(default_factory=lambda: StateSpaceNames.within("mamba"))
    are_decays_logarithms: bool = True
    """Whether the decay of states is stored as a logarithm, rather than as a negative number."""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    value_norm: str = "self_attn.v_norm"
    sinks: str = "self_attn.sinks"
    latent: LatentNames = field(default_factory=LatentNames)
    delta: DeltaNames = field(default_factory=DeltaNames)
    before_attention: str = "input_layernorm"
    after_attention: str = "post_attention_layernorm"
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str = "post_feedforward_layernorm"
    others: Mapping[str, str] = field(default_factory=dict)
    """Other names of norms and of parts of feed-forward parts, under which some checkpoints have
    them."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    router: str = "mlp.gate"
    router_norm: str = "router.scale"
    before_experts: str = "pre_feedforward_layernorm_2"
    after_experts: str = "post_feedforward_layernorm_2"
    after_shared: str = "post_feedforward_layernorm_1"
    factors: str = "router.per_expert_scale"
    correction: str = "mlp.gate.e_score_correction_bias"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    are_experts_transposed: bool = False
    """Whether stacked matrices of experts are [inputs, outputs], in some checkpoints at least."""
    are_gates_interleaved: bool = False
    """Whether the rows of gate and other half alternate in the matrices of experts."""
    shared_gate_up: tuple[str, ...] = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
    )
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    latent_down: str = "mlp.fc1_latent_proj"
    latent_up: str = "mlp.fc2_latent_proj"
    scalar: str = "layer_scalar"
    input_gate: str = "per_layer_input_gate"
    input_expansion: str = "per_layer_projection"
    after_input: str = "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of a model's tensors in a checkpoint."""

    layers: LayerNames = field(default_factory=LayerNames)
    prefixes: tuple[str, ...] = ("model.",)
    """The possible prefixes of the names of the language model's tensors; the first that fits
    counts. Everything else in the checkpoint, such as a tower for images, is not read."""
    embedding: str = "embed_tokens"
    embedding_norm: str = "embed_norm"
    layer: str = "layers"
    """What the number of a layer follows."""
    final_norm: str = "norm"
    heads: tuple[str, ...] = ("lm_head",)
    input_table: str = "embed_tokens_per_layer"
    input_projection: str = "per_layer_model_projection"
    input_norm: str = "per_layer_projection_norm"
    has_further_layers: bool = False
    """Whether the checkpoint may have further layers after the model's, which predict several
    tokens at once and are not read."""
    further_parts: tuple[str, ...] = ()
    """How the names of other tensors begin, after the prefix, that are not read for the same
    reason."""
    is_within: bool = False
    """Whether the checkpoint also holds other models, whose tensors are not read."""

    first_layer: int = 0
    """The number in the name of the first layer."""

    def prefix_in(self, has: Callable[[str], bool]) -> str:
        """The prefix of the names in a checkpoint that has these tensors."""
        fitting = (one for one in self.prefixes if has(f"{one}{self.embedding}.weight"))
        return next(fitting, self.prefixes[0])

    def within(self) -> "Names":
        """The names of the same model in a checkpoint that also holds towers for images or sound,
        as saved by new and by old versions of transformers."""
        return replace(
            self,
            prefixes=("model.language_model.", "language_model.model."),
            heads=("lm_head", "language_model.lm_head"),
            is_within=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A layer that predicts the token after the next (DeepSeek-AI, arXiv:2412.19437, section 2.2).
    A product makes its input of the next token's embedding and of the decoder's last hidden state
    after the final norm, each normalized. It shares the decoder's embedding and output
    projection."""

    layer: Layer
    norm: Norm
    """The norm of embeddings and of hidden states, and the final norm."""
    prefix: str | None
    """The prefix of the names of the predictor's tensors; None: that of the decoder's."""
    number: int
    """The number in the name of the layer."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    parent: str = "layers"
    """What the number of the layer follows in its name."""
    is_hidden_first: bool = False
    """Whether the hidden state, rather than the embedding, is the first half of the product's
    inputs."""

    @classmethod
    def apart(cls, layer: Layer, norm: Norm) -> "Predictor":
        """A predictor with names of its own, as Qwen3-Next has it."""
        return cls(
            layer=layer,
            norm=norm,
            prefix="mtp.",
            number=0,
            embedding_norm="pre_fc_norm_embedding",
            hidden_norm="pre_fc_norm_hidden",
            projection="fc",
            final_norm="norm",
        )

    @classmethod
    def behind(cls, layers: Sequence[Layer], norm: Norm) -> "Predictor":
        """A predictor that is stored as a further layer, like the last of these, as DeepSeek V3 has
        it."""
        stem = f"layers.{len(layers)}"
        return cls(
            layer=layers[-1],
            norm=norm,
            prefix=None,
            number=len(layers),
            embedding_norm=f"{stem}.enorm",
            hidden_norm=f"{stem}.hnorm",
            projection=f"{stem}.eh_proj",
            final_norm=f"{stem}.shared_head.norm",
        )

    @classmethod
    def beside(cls, layer: Layer, norm: Norm) -> "Predictor":
        """A predictor that is the first of a list beside the decoder's layers, as MiMo has it."""
        parent, number = "mtp_layers", 0
        stem = f"{parent}.{number}"
        return cls(
            layer=layer,
            norm=norm,
            prefix=None,
            number=number,
            embedding_norm=f"{stem}.token_layernorm",
            hidden_norm=f"{stem}.hidden_layernorm",
            projection=f"{stem}.input_proj",
            final_norm=f"{stem}.final_layernorm",
            parent=parent,
            is_hidden_first=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole decoder."""

    vocab_size: int
    hidden_size: int
    max_seq_len: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    has_tied_embeddings: bool
    has_head_bias: bool = False
    embedding_scale: float = 1.0
    embedding_norm: Norm | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    layer_inputs: LayerInputs | None = None
    names: Names = field(default_factory=Names)
    predictor: Predictor | None = None
    """Checkpoints may be without the predictor of their family."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer that has attention."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    def kv_layer(self, index: int) -> int:
        """The layer whose keys and values a layer with attention reads: itself, or an earlier
        layer."""
        attention = self.layers[index].attention
        return index if attention is None or attention.kv_from is None else attention.kv_from

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a recurrent state."""
        return any(layer.recurrence is not None for layer in self.layers)

    @property
    def num_kv_heads(self) -> int:
        """The heads of the layer whose keys take most room in the cache."""
        largest = self._largest
        return 1 if largest is None else largest.num_kv_heads

    @property
    def head_dim(self) -> int:
        """The length of the heads of the layer whose keys take most room in the cache; without
        attention, of a part of the longest state."""
        largest = self._largest
        if largest is not None:
            return largest.head_dim
        longest = max(one.recurrence.state_size for one in self.layers if one.recurrence)
        return -(-longest // (_STATE_PARTS * _HEAD_STEP)) * _HEAD_STEP

    @property
    def _largest(self) -> Attention | None:
        return max(self.attentions, key=lambda shape: shape.key_size, default=None)

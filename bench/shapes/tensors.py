"""The tensors of the GGUF files of published shapes, under llama.cpp's names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Config: TypeAlias = Mapping[str, Any]
Role: TypeAlias = Literal["most", "head", "improved"]
"""What a matrix is to a mix of formats: see `bench.shapes.model_file.Mix`."""


@dataclass(frozen=True, slots=True)
class Vector:
    """A tensor of floats, all of the same value."""

    name: str
    shape: tuple[int, ...]
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor of random weights, [rows, columns]."""

    name: str
    rows: int
    columns: int
    role: Role = "most"


Tensor: TypeAlias = Vector | Matrix
Mixer: TypeAlias = Callable[[Config, int], Iterator[Tensor]]
"""The tensors of a layer's attention, or of what stands in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family as llama.cpp knows it."""

    name: str
    """In ``general.architecture``."""
    mixer: Mixer
    before_feed_forward: str = "ffn_norm"
    has_recurrence: bool = False


def _attention(
    norms: Sequence[str] = (), *, has_gate: bool = False
) -> Callable[[Config, int], Iterator[Tensor]]:
    """Attention with these norms of heads. With a gate, queries and gates are one matrix."""

    def tensors(config: Config, layer: int) -> Iterator[Tensor]:
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        attended = config["num_attention_heads"] * head_dim
        keys = config["num_key_value_heads"] * head_dim
        yield from (Vector(f"{norm}.weight", (head_dim,)) for norm in norms)
        yield Matrix("attn_q.weight", attended * (2 if has_gate else 1), hidden)
        yield Matrix("attn_k.weight", keys, hidden)
        yield Matrix("attn_v.weight", keys, hidden, "improved")
        yield Matrix("attn_output.weight", hidden, attended)

    return tensors


def _hybrid(config: Config, layer: int) -> Iterator[Tensor]:
    """Qwen 3.5's layers: the last of each interval has attention, the others the gated delta
    rule."""
    if (layer + 1) % config["full_attention_interval"] == 0:
        yield from _GATED_ATTENTION(config, layer)
        return
    hidden, num_heads = config["hidden_size"], config["linear_num_value_heads"]
    value_dim = config["linear_value_head_dim"]
    values = num_heads * value_dim
    mixed = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    yield Vector("ssm_conv1d.weight", (mixed, config["linear_conv_kernel_dim"]), 0.3)
    yield Vector("ssm_a", (num_heads,), -1.0)
    yield Vector("ssm_dt.bias", (num_heads,), 0.0)
    yield Vector("ssm_norm.weight", (value_dim,))
    yield Matrix("attn_qkv.weight", mixed, hidden)
    yield Matrix("attn_gate.weight", values, hidden)
    yield Matrix("ssm_alpha.weight", num_heads, hidden)
    yield Matrix("ssm_beta.weight", num_heads, hidden)
    yield Matrix("ssm_out.weight", hidden, values)


_NORMS = ("attn_q_norm", "attn_k_norm")
_GATED_ATTENTION = _attention(_NORMS, has_gate=True)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(name="llama", mixer=_attention()),
    "qwen3": Architecture(name="qwen3", mixer=_attention(_NORMS)),
    "qwen3_5_text": Architecture(
        name="qwen35",
        mixer=_hybrid,
        before_feed_forward="post_attention_norm",
        has_recurrence=True,
    ),
}
"""The families whose shapes can be written."""


def tensors_of(config: Config) -> Iterator[Tensor]:
    """All tensors of a configuration of one of `ARCHITECTURES`."""
    architecture = ARCHITECTURES[config["model_type"]]
    vocab, hidden, inner = (
        config[size] for size in ("vocab_size", "hidden_size", "intermediate_size")
    )
    is_tied = config["tie_word_embeddings"]
    yield Vector("output_norm.weight", (hidden,))
    yield Matrix("token_embd.weight", vocab, hidden, "head" if is_tied else "most")
    if not is_tied:
        yield Matrix("output.weight", vocab, hidden, "head")
    for layer in range(config["num_hidden_layers"]):
        of_layer: tuple[Tensor, ...] = (
            Vector("attn_norm.weight", (hidden,)),
            Vector(f"{architecture.before_feed_forward}.weight", (hidden,)),
            *architecture.mixer(config, layer),
            Matrix("ffn_gate.weight", inner, hidden),
            Matrix("ffn_up.weight", inner, hidden),
            Matrix("ffn_down.weight", hidden, inner, "improved"),
        )
        is_improved = _is_improved(layer, config["num_hidden_layers"])
        for tensor in of_layer:
            match tensor:
                case Vector(name, shape, value):
                    yield Vector(f"blk.{layer}.{name}", shape, value)
                case Matrix(name, rows, columns, role):
                    yield Matrix(
                        f"blk.{layer}.{name}", rows, columns, role if is_improved else "most"
                    )


def _is_improved(layer: int, num_layers: int) -> bool:
    """llama.cpp's ``use_more_bits``: the first and the last eighth of the layers, and every third
    layer between."""
    first, last = num_layers // 8, 7 * num_layers // 8
    return layer < first or layer >= last or (layer - first) % 3 == 2

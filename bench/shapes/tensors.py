"""The tensors of the GGUF files of published shapes, under llama.cpp's names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

ConfigValues: TypeAlias = Mapping[str, Any]
MatrixRole: TypeAlias = Literal["most", "head", "improved", "router"]
"""What a matrix is to a mix of formats: see `bench.shapes.model_file.Mix`."""


@dataclass(frozen=True, slots=True)
class Vector:
    """A tensor of floats, all of the same value."""

    name: str
    shape: tuple[int, ...]
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor of random weights, [rows, columns], or [count, rows, columns] of experts."""

    name: str
    rows: int
    columns: int
    role: MatrixRole = "most"
    count: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        of_one = (self.rows, self.columns)
        return of_one if self.count is None else (self.count, *of_one)


Tensor: TypeAlias = Vector | Matrix
LayerPart: TypeAlias = Callable[[ConfigValues, int], Iterator[Tensor]]
"""The tensors of a part of a layer, by its number: of its attention, of what stands in the place of
attention, or of its feed-forward part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """A family as llama.cpp knows it."""

    name: str
    """In ``general.architecture``."""
    mixer: LayerPart
    feed_forward: LayerPart
    before_feed_forward: str = "ffn_norm"
    has_recurrence: bool = False


def _attention(
    norms: Sequence[str] = (),
    *,
    has_gate: bool = False,
    has_biases: bool = False,
    has_sinks: bool = False,
) -> LayerPart:
    """Attention with these norms of heads. With a gate, queries and gates are one matrix."""

    def tensors(config: ConfigValues, layer: int) -> Iterator[Tensor]:
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        attended = config["num_attention_heads"] * head_dim
        keys = config["num_key_value_heads"] * head_dim
        yield from (Vector(f"{norm}.weight", (head_dim,)) for norm in norms)
        yield Matrix("attn_q.weight", attended * (2 if has_gate else 1), hidden)
        yield Matrix("attn_k.weight", keys, hidden)
        yield Matrix("attn_v.weight", keys, hidden, "improved")
        yield Matrix("attn_output.weight", hidden, attended)
        if has_biases:
            yield from _biases(attn_q=attended, attn_k=keys, attn_v=keys, attn_output=hidden)
        if has_sinks:
            yield Vector("attn_sinks.weight", (config["num_attention_heads"],), 0.0)

    return tensors


def _biases(**sizes: int) -> Iterator[Vector]:
    yield from (Vector(f"{name}.bias", (size,), 0.0) for name, size in sizes.items())


def _hybrid(config: ConfigValues, layer: int) -> Iterator[Tensor]:
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


def _mlp(config: ConfigValues, layer: int) -> Iterator[Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield Matrix("ffn_gate.weight", inner, hidden)
    yield Matrix("ffn_up.weight", inner, hidden)
    yield Matrix("ffn_down.weight", hidden, inner, "improved")


def _experts(number: str, inner_size: str, *, has_biases: bool = False) -> LayerPart:
    """Experts and their router, by the keys of config.json that have their number and their
    size. A router's weights are drawn from the hidden states, so they are random, too."""

    def tensors(config: ConfigValues, layer: int) -> Iterator[Tensor]:
        hidden, inner, count = (config[key] for key in ("hidden_size", inner_size, number))
        yield Matrix("ffn_gate_inp.weight", count, hidden, "router")
        yield Matrix("ffn_gate_exps.weight", inner, hidden, count=count)
        yield Matrix("ffn_up_exps.weight", inner, hidden, count=count)
        yield Matrix("ffn_down_exps.weight", hidden, inner, "improved", count=count)
        if has_biases:
            yield from _biases(ffn_gate_inp=count)
            sizes = {"ffn_gate_exps": inner, "ffn_up_exps": inner, "ffn_down_exps": hidden}
            for name, size in sizes.items():
                yield Vector(f"{name}.bias", (count, size), 0.0)

    return tensors


_NORMS = ("attn_q_norm", "attn_k_norm")
_GATED_ATTENTION = _attention(_NORMS, has_gate=True)

ARCHITECTURES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(name="llama", mixer=_attention(), feed_forward=_mlp),
    "qwen3": GgufFamily(name="qwen3", mixer=_attention(_NORMS), feed_forward=_mlp),
    "qwen3_moe": GgufFamily(
        name="qwen3moe",
        mixer=_attention(_NORMS),
        feed_forward=_experts("num_experts", "moe_intermediate_size"),
    ),
    "gpt_oss": GgufFamily(
        name="gpt-oss",
        mixer=_attention(has_biases=True, has_sinks=True),
        feed_forward=_experts("num_local_experts", "intermediate_size", has_biases=True),
        before_feed_forward="post_attention_norm",
    ),
    "qwen3_5_text": GgufFamily(
        name="qwen35",
        mixer=_hybrid,
        feed_forward=_mlp,
        before_feed_forward="post_attention_norm",
        has_recurrence=True,
    ),
}
"""The families whose shapes can be written."""


def tensors_of(config: ConfigValues) -> Iterator[Tensor]:
    """All tensors of a configuration of one of `ARCHITECTURES`."""
    architecture = ARCHITECTURES[config["model_type"]]
    vocab, hidden = config["vocab_size"], config["hidden_size"]
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
            *architecture.feed_forward(config, layer),
        )
        is_improved = _is_improved(layer, config["num_hidden_layers"])
        for tensor in of_layer:
            match tensor:
                case Vector(name, shape, value):
                    yield Vector(f"blk.{layer}.{name}", shape, value)
                case Matrix(name, role="improved") if not is_improved:
                    yield replace(tensor, name=f"blk.{layer}.{name}", role="most")
                case Matrix(name):
                    yield replace(tensor, name=f"blk.{layer}.{name}")


def _is_improved(layer: int, num_layers: int) -> bool:
    """llama.cpp's ``use_more_bits``: the first and the last eighth of the layers, and every third
    layer between."""
    first, last = num_layers // 8, 7 * num_layers // 8
    return layer < first or layer >= last or (layer - first) % 3 == 2

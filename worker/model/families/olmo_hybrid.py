"""OLMo Hybrid: most layers are linear attention by the gated delta rule, with norms before their
parts, and the others are OLMo 3's, with norms after theirs."""

from collections.abc import Sequence
from dataclasses import replace

from worker.model.config import Config, NotNative
from worker.model.families import olmo2, qwen3_next
from worker.model.spec import DeltaNames, DeltaNet, Layer, LayerNames, ModelSpec, Names, Norm, Rope

_DEFAULTS = {
    "vocab_size": 100_352,
    "hidden_size": 3840,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "max_position_embeddings": 65_536,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
_NAMES = Names(
    layers=LayerNames(
        delta=DeltaNames(
            inputs=tuple(f"linear_attn.{part}_proj" for part in "qkvg"),
            rates=("linear_attn.b_proj", "linear_attn.a_proj"),
            convolution=tuple(f"linear_attn.{part}_conv1d" for part in "qkv"),
            norm="linear_attn.o_norm",
            output="linear_attn.o_proj",
        ),
        before_attention="attention_layer_norm",
        before_feed_forward="feedforward_layer_norm",
        # transformers saves it under the name that the other layers have for another norm.
        others={"post_attention_layernorm": "feedforward_layer_norm"},
    )
)
_LINEAR = "linear_attention"
_EPS = 1e-5
"""Of the results of linear attention, whatever the configuration says about the other norms."""


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6))
    whole = Layer(
        attention=olmo2.attention(config, norm, rope=_rope(config)),
        feed_forward=config.mlp(),
        after_attention=norm,
        after_feed_forward=norm,
    )
    linear = Layer(
        recurrence=_delta_net(config),
        feed_forward=config.mlp(),
        before_attention=norm,
        before_feed_forward=norm,
    )
    layers = [linear if kind == _LINEAR else whole for kind in _kinds(config)]
    return config.model(layers, norm, _NAMES)


def _kinds(config: Config) -> Sequence[str]:
    """The kind of each layer."""
    default = [
        _LINEAR if (index + 1) % 4 else "full_attention" for index in range(config.num_layers)
    ]
    return config.kinds(default, [_LINEAR])


def _rope(config: Config) -> Rope | None:
    """The positions, of which the released models have none: they state no theta."""
    parameters = config.get("rope_parameters", {})
    if config.get("rope_theta", parameters.get("rope_theta")) is None:
        return None
    return config.rope(config.head_dim)


def _delta_net(config: Config) -> DeltaNet:
    if config.activation() != "silu":
        raise NotNative("the convolutions of its linear attention are not followed by a SiLU")
    num_heads = config.size("num_attention_heads")
    num_key_heads = config.size("linear_num_key_heads", num_heads)
    key_dim = config.size(
        "linear_key_head_dim", 3 * config.size("hidden_size") // (4 * num_key_heads)
    )
    stated = config.with_defaults(
        {
            "linear_num_key_heads": num_key_heads,
            "linear_num_value_heads": num_heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": 2 * key_dim,
        }
    )
    return replace(
        qwen3_next.delta_net(stated),
        norm=Norm(eps=_EPS),
        greatest_strength=2.0 if config.flag("linear_allow_neg_eigval") else 1.0,
    )

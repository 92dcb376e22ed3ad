"""MPT, without biases, and with scores that fall with the distance."""

from worker.model.config import Config, NotNative, alibi_slopes
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm

_KEYS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "expansion_ratio": 4,
    "no_bias": True,
    "tie_word_embeddings": True,
}
_OF_ATTENTION = {"attn_type": "multihead_attention", "alibi": True}
_NAMES = Names(
    layers=LayerNames(
        qkv=("attn.Wqkv",),
        attention_output="attn.out_proj",
        before_attention="norm_1",
        before_feed_forward="norm_2",
        gate_up=("ffn.up_proj",),
        down="ffn.down_proj",
    ),
    prefixes=("transformer.",),
    embedding="wte",
    layer="blocks",
    final_norm="norm_f",
)


def read(config: Config) -> ModelSpec:
    config = config.renamed(_KEYS).with_defaults(_DEFAULTS)
    heads = config.within("attn_config", _OF_ATTENTION)
    _check(config, heads)
    norm = Norm(eps=config.number("layer_norm_epsilon", 1e-5), kind="layer")
    num_heads, size = config.size("num_attention_heads"), config.size("hidden_size")
    layer = Layer(
        attention=config.attention(
            num_kv_heads=num_heads,
            rope=None,
            scale=heads.number("softmax_scale", config.head_dim**-0.5),
            slopes=alibi_slopes(num_heads, heads.number("alibi_bias_max", 8.0)),
        ),
        feed_forward=config.mlp(
            config.size("expansion_ratio") * size, activation="gelu", is_gated=False
        ),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, _NAMES)


def _check(config: Config, heads: Config) -> None:
    """Raise `NotNative` for what the released models lack."""
    if not config.flag("no_bias"):
        raise NotNative("its matrices have biases")
    if config.get("logit_scale") is not None:
        raise NotNative("its logits are scaled")
    if heads.get("attn_type") != "multihead_attention":
        raise NotNative(f"its attention is {heads.get('attn_type')}")
    if not heads.flag("alibi"):
        raise NotNative("its positions are learnt")
    for key in ("clip_qkv", "qk_ln", "prefix_lm"):
        if heads.get(key):
            raise NotNative(f"{key} is {heads.get(key)}")

"""BLOOM, whose scores fall with the distance in place of rotary positions."""

from worker.model.config import Config, NotNative, alibi_slopes
from worker.model.spec import Layer, LayerNames, ModelSpec, Names, Norm

_KEYS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "seq_length": "max_position_embeddings",
}
_DEFAULTS = {"max_position_embeddings": 2048, "tie_word_embeddings": True}
_NAMES = Names(
    layers=LayerNames(
        qkv=("self_attention.query_key_value",),
        are_heads_together=True,
        attention_output="self_attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    prefixes=("transformer.", ""),
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    layer="h",
    final_norm="ln_f",
)


def read(config: Config) -> ModelSpec:
    config = config.renamed(_KEYS).with_defaults(_DEFAULTS)
    if config.flag("apply_residual_connection_post_layernorm"):
        raise NotNative("norms are added to the results of layers")
    norm = Norm(eps=config.number("layer_norm_epsilon", 1e-5), kind="layer", has_bias=True)
    num_heads = config.size("num_attention_heads")
    layer = Layer(
        attention=config.attention(
            num_kv_heads=num_heads,
            rope=None,
            slopes=alibi_slopes(num_heads),
            has_qkv_bias=True,
            has_output_bias=True,
        ),
        feed_forward=config.mlp(
            4 * config.size("hidden_size"), activation="gelu_tanh", is_gated=False, has_bias=True
        ),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, _NAMES, embedding_norm=norm)

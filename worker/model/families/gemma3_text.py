"""Gemma 3: five layers with a window and positions of their own before each layer without."""

from worker.model.config import Config
from worker.model.families import gemma2
from worker.model.spec import ModelSpec, Names, Norm, QkNorm, Rope

DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}


def read(config: Config, names: Names = gemma2.NAMES) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6), adds_one=True)
    ropes = {"full_attention": config.rope(config.head_dim, "full_attention", theta=1e6)}
    ropes["sliding_attention"] = _local_rope(config)
    every = config.get("sliding_window_pattern", 6)
    kinds = config.kinds(
        [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(config.num_layers)
        ]
    )
    layers = [
        gemma2.layer(
            config,
            norm,
            rope=ropes[kind],
            window=config.window() if kind == "sliding_attention" else None,
            qk_norm=QkNorm(norm=norm),
        )
        for kind in kinds
    ]
    return config.model(
        layers,
        norm,
        names,
        embedding_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
    )


def _local_rope(config: Config) -> Rope:
    """The positions of layers with a window, which the checkpoints of the first release name
    apart."""
    if isinstance(config.get("rope_parameters", {}).get("sliding_attention"), dict):
        return config.rope(config.head_dim, "sliding_attention", theta=1e4)
    theta = config.number("rope_local_base_freq", 1e4)
    return Rope(parameters={"rope_type": "default", "rope_theta": theta}, dim=config.head_dim)

"""Ministral 3, a Mistral whose queries grow with their positions."""

from worker.model.config import Config
from worker.model.spec import Layer, ModelSpec, Names, Norm, Rope, Temperature

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def read(config: Config, names: Names | None = None) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    rope = config.rope(config.head_dim)
    layer = Layer(
        attention=config.attention(
            rope=rope, window=config.window(), temperature=temperature_of(rope)
        ),
        feed_forward=config.mlp(),
        before_attention=norm,
        before_feed_forward=norm,
    )
    return config.model([layer] * config.num_layers, norm, names)


def temperature_of(rope: Rope) -> Temperature | None:
    """How queries grow with their positions."""
    beta = rope.parameters.get("llama_4_scaling_beta")
    length = rope.parameters["original_max_position_embeddings"]
    return Temperature(scale=beta, length=length) if beta else None

"""OLMo 3, an OLMo 2 with windows, whose positions are not scaled."""

from worker.model.config import Config
from worker.model.families import olmo2
from worker.model.spec import Layer, ModelSpec, Norm, Rope

_DEFAULTS = {"max_position_embeddings": 2048, "sliding_window": 4096}
_THETA = 500_000.0


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    whole = config.rope(config.head_dim, "full_attention", theta=_THETA)
    local = _local_rope(config, whole)
    kinds = [
        "sliding_attention" if (layer + 1) % 4 else "full_attention"
        for layer in range(config.num_layers)
    ]
    layers = [
        Layer(
            attention=olmo2.attention(
                config, norm, rope=whole if window is None else local, window=window
            ),
            feed_forward=config.mlp(),
            before_attention=None,
            after_attention=norm,
            after_feed_forward=norm,
        )
        for window in config.windows(kinds)
    ]
    return config.model(layers, norm)


def _local_rope(config: Config, whole: Rope) -> Rope:
    """The positions of layers with a window: checkpoints whose scaling is stated once mean the
    other layers."""
    if isinstance(config.get("rope_parameters", {}).get("sliding_attention"), dict):
        return config.rope(config.head_dim, "sliding_attention", theta=_THETA)
    theta = whole.parameters["rope_theta"]
    return Rope(parameters={"rope_type": "default", "rope_theta": theta}, dim=config.head_dim)

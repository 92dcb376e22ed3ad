"""Mamba, whose layers are selective state spaces without a feed-forward part."""

from worker.model.config import Config
from worker.model.families.mamba2 import NAMES, require_silu
from worker.model.spec import Layer, Mamba, ModelSpec, Norm

_DEFAULTS = {
    "vocab_size": 50_280,
    "hidden_size": 768,
    "num_hidden_layers": 32,
    # Nothing in the model depends on the number of tokens.
    "max_position_embeddings": 262_144,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
}


def read(config: Config) -> ModelSpec:
    return of_state_spaces(config, None)


def of_state_spaces(config: Config, norm_of_parts: Norm | None) -> ModelSpec:
    """The model, whose steps and vectors that write and read have this norm."""
    config = config.with_defaults(_DEFAULTS)
    require_silu(config)
    hidden_size = config.size("hidden_size")
    recurrence = Mamba(
        size=config.size("intermediate_size", config.size("expand") * hidden_size),
        state_dim=config.size("state_size"),
        rank=rank_of(config, "time_step_rank"),
        num_taps=config.size("conv_kernel"),
        norm=norm_of_parts,
        has_bias=config.flag("use_bias"),
        has_convolution_bias=config.flag("use_conv_bias"),
    )
    norm = Norm(eps=config.number("layer_norm_epsilon", 1e-5))
    layer = Layer(recurrence=recurrence, before_attention=norm)
    return config.model([layer] * config.num_layers, norm, NAMES)


def rank_of(config: Config, key: str) -> int:
    """The length of the vector that steps are made from."""
    is_automatic = config.get(key, "auto") == "auto"
    return -(-config.size("hidden_size") // 16) if is_automatic else config.size(key)

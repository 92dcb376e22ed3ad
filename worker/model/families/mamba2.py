"""Mamba 2, whose layers are state spaces without a feed-forward part."""

from math import inf

from worker.model.config import Config, NotNative
from worker.model.spec import Layer, LayerNames, Mamba2, ModelSpec, Names, Norm, StateSpaceNames

_DEFAULTS = {
    "vocab_size": 32_768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    # Nothing in the model depends on the number of tokens.
    "max_position_embeddings": 262_144,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
}
NAMES = Names(
    layers=LayerNames(state_space=StateSpaceNames.within("mixer"), before_attention="norm"),
    prefixes=("backbone.",),
    embedding="embeddings",
    final_norm="norm_f",
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    norm = Norm(eps=config.number("layer_norm_epsilon", 1e-5))
    layer = Layer(recurrence=_state_space(config, norm), before_attention=norm)
    return config.model([layer] * config.num_layers, norm, NAMES)


def _state_space(config: Config, norm: Norm) -> Mamba2:
    require_silu(config)
    least_step, greatest_step = config.numbers("time_step_limit", (0.0, inf))
    has_bias = config.flag("use_bias")
    return Mamba2(
        num_heads=config.size("num_heads"),
        head_dim=config.size("head_dim"),
        num_groups=config.size("n_groups"),
        state_dim=config.size("state_size"),
        num_taps=config.size("conv_kernel"),
        norm=norm,
        least_step=least_step,
        greatest_step=greatest_step,
        has_bias=has_bias,
        has_output_bias=has_bias,
        has_convolution_bias=config.flag("use_conv_bias"),
    )


def require_silu(config: Config, key: str = "hidden_act") -> None:
    """Accept no other activation after the convolution of a state space."""
    if config.activation(key) != "silu":
        raise NotNative("the convolutions of its state spaces are not followed by a SiLU")

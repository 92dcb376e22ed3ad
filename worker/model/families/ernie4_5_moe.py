"""ERNIE 4.5 with experts; some experts compute all tokens."""

from kernels.router import Router
from worker.model.config import Config, NotNative
from worker.model.families import ernie4_5
from worker.model.spec import Experts, Layer, LayerNames, ModelSpec, Names, Norm

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
    "moe_layer_start_index": 1,
}
_NAMES = Names(
    layers=LayerNames(
        correction="mlp.moe_statics.e_score_correction_bias",
        shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
    ),
    further_parts=("mtp_",),
)


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    if config.flag("use_bias"):
        raise NotNative("use_bias is set, and with it a bias of the logits")
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    experts = _experts(config)
    layers = [
        Layer(
            attention=ernie4_5.attention(config),
            feed_forward=experts if _is_mixture(config, index) else config.mlp(),
            before_attention=norm,
            before_feed_forward=norm,
        )
        for index in range(config.num_layers)
    ]
    return config.model(layers, norm, _NAMES)


def _is_mixture(config: Config, index: int) -> bool:
    """Whether a layer has experts."""
    last = config.get("moe_layer_end_index", -1)
    mixtures = range(
        config.get("moe_layer_start_index"), config.num_layers if last < 0 else last + 1
    )
    is_due: bool = (index + 1) % config.get("moe_layer_interval", 1) == 0
    return index in mixtures and is_due


def _experts(config: Config) -> Experts:
    size, num_shared = config.size("moe_intermediate_size"), config.get("moe_num_shared_experts")
    return Experts(
        count=config.size("moe_num_experts"),
        expert=config.mlp("moe_intermediate_size"),
        router=Router(
            top_k=config.size("moe_k"), scores="softmax", is_normalized=True, has_correction=True
        ),
        shared=config.mlp(size=size * num_shared) if num_shared else None,
    )

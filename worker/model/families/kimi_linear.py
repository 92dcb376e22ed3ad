"""Kimi Linear: most layers are linear attention by Kimi's delta rule, and the others attention over
latent vectors without positions; experts are DeepSeek V3's."""

from collections.abc import Sequence

from shared.errors import StartupError
from worker.model.config import Config, NotNative
from worker.model.families.deepseek_v3 import latent_attention
from worker.model.families.glm4_moe import experts_of
from worker.model.families.glm4_moe_lite import mixtures
from worker.model.spec import DeltaNames, KimiDelta, Layer, LayerNames, ModelSpec, Names, Norm

_DEFAULTS = {
    "num_attention_heads": 32,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_OWN_KEYS = {
    "n_routed_experts": ("num_experts", 256),
    "num_experts_per_tok": ("num_experts_per_token", 8),
    "n_shared_experts": ("num_shared_experts", 1),
    "n_group": ("num_expert_group", 1),
    "norm_topk_prob": ("moe_renormalize", True),
    "max_position_embeddings": ("model_max_length", 1_048_576),
}
"""The family's names of keys that other families have, too, and their defaults."""
_EXPERTS = "block_sparse_moe"
_NAMES = Names(
    layers=LayerNames(
        delta=DeltaNames(
            inputs=tuple(f"self_attn.{part}_proj" for part in "qkv"),
            rates=("self_attn.f_a_proj", "self_attn.g_a_proj", "self_attn.b_proj"),
            fading="self_attn.f_b_proj",
            gates="self_attn.g_b_proj",
            convolution=tuple(f"self_attn.{part}_conv1d" for part in "qkv"),
            decay="self_attn.A_log",
            decay_bias="self_attn.dt_bias",
            norm="self_attn.o_norm",
            output="self_attn.o_proj",
        ),
        router=f"{_EXPERTS}.gate",
        correction=f"{_EXPERTS}.gate.e_score_correction_bias",
        expert_gate_up=(f"{_EXPERTS}.experts.{{}}.w1", f"{_EXPERTS}.experts.{{}}.w3"),
        expert_down=f"{_EXPERTS}.experts.{{}}.w2",
        shared_gate_up=(
            f"{_EXPERTS}.shared_experts.gate_proj",
            f"{_EXPERTS}.shared_experts.up_proj",
        ),
        shared_down=f"{_EXPERTS}.shared_experts.down_proj",
        # transformers saves layers without experts under the name of those with experts.
        others={f"mlp.{part}_proj": f"{_EXPERTS}.{part}_proj" for part in ("gate", "up", "down")},
    )
)
_LINEAR = "linear_attention"


def read(config: Config) -> ModelSpec:
    config = config.with_defaults(_DEFAULTS)
    config = config.with_defaults(
        {key: config.get(own, default) for key, (own, default) in _OWN_KEYS.items()}
    )
    config.require("moe_layer_freq", 1)
    if not config.get("mla_use_nope", True):
        raise NotNative("its attention has positions")
    norm = Norm(eps=config.number("rms_norm_eps", 1e-5))
    attention, delta = latent_attention(config, None), _delta(config, norm)
    experts = experts_of(config)
    layers = [
        Layer(
            attention=None if kind == _LINEAR else attention,
            recurrence=delta if kind == _LINEAR else None,
            feed_forward=experts if is_mixture else config.mlp(),
            before_attention=norm,
            before_feed_forward=norm,
        )
        for kind, is_mixture in zip(_kinds(config), mixtures(config), strict=True)
    ]
    return config.model(layers, norm, _NAMES)


def _kinds(config: Config) -> Sequence[str]:
    """The kind of each layer; published configurations count the layers of each kind from 1."""
    every_fourth = range(5, config.num_layers + 1, 4)
    whole = config.within("linear_attn_config").get("full_attn_layers", every_fourth)
    if not isinstance(whole, list | range):
        raise StartupError(f"the model's config.json says full_attn_layers {whole!r}, not a list")
    default = [
        "full_attention" if number in whole else _LINEAR
        for number in range(1, config.num_layers + 1)
    ]
    return config.kinds(default, [_LINEAR])


def _delta(config: Config, norm: Norm) -> KimiDelta:
    if config.activation() != "silu":
        raise NotNative("the convolutions of its linear attention are not followed by a SiLU")
    sizes = config.within(
        "linear_attn_config",
        {
            "num_heads": config.get("linear_num_heads", 32),
            "head_dim": config.get("linear_head_dim", 128),
            "short_conv_kernel_size": config.get("linear_conv_kernel_dim", 4),
        },
    )
    head_dim = sizes.size("head_dim")
    return KimiDelta(
        num_heads=sizes.size("num_heads"),
        head_dim=head_dim,
        rank=head_dim,
        num_taps=sizes.size("short_conv_kernel_size"),
        norm=norm,
    )

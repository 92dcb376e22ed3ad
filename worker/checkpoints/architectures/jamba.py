"""Jamba, most of whose layers are Mamba state spaces."""

from collections.abc import Sequence
from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    layers = range(model.num_layers)
    counts = model.each("attention.head_count_kv")
    mixtures = [k for k in layers if model.has(f"blk.{k}.ffn_gate_inp.weight")]
    return {
        **model.decoder(),
        **(model.experts("num_experts") if mixtures else {"num_experts": 1}),
        **_every("attn_layer", [k for k in layers if counts[k]], len(layers)),
        **_every("expert_layer", mixtures, len(layers)),
        "model_type": "jamba",
        "mamba_d_state": model.size("ssm.state_size"),
        "mamba_d_conv": model.size("ssm.conv_kernel"),
        "mamba_expand": model.size("ssm.inner_size") // max(1, model.size("embedding_length")),
        "mamba_dt_rank": model.size("ssm.time_step_rank"),
        "mamba_conv_bias": model.has("blk.ssm_conv1d.bias"),
        "mamba_proj_bias": model.has("blk.ssm_in.bias"),
    }


def _every(kind: str, chosen: Sequence[int], num_layers: int) -> dict[str, int]:
    """The period and the offset of layers of a kind, which are one of each so many."""
    first, second = (*chosen, num_layers, num_layers)[:2]
    period = second - first if len(chosen) > 1 else num_layers
    return {f"{kind}_period": period, f"{kind}_offset": first}


ARCHITECTURE = Architecture(name="jamba", read=read)

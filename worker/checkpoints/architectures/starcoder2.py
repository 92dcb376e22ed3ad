"""StarCoder 2."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    return {
        **model.decoder(),
        "model_type": "starcoder2",
        "norm_epsilon": model.number("attention.layer_norm_epsilon", 1e-5),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": model.has("blk.attn_q.bias"),
    }


ARCHITECTURE = Architecture(name="starcoder2", read=read)

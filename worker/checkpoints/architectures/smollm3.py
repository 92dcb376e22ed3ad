"""SmolLM3."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    config = model.decoder() | {"model_type": "smollm3", "use_sliding_window": False}
    return config | {"no_rope_layers": [(k + 1) % 4 for k in range(model.num_layers)]}


ARCHITECTURE = Architecture(name="smollm3", read=read, rotates_pairs=True)

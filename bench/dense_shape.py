"""The sizes of a model all of whose layers have the same shape, and no experts."""

from dataclasses import dataclass, replace
from typing import Any

from worker.model.families import spec_of
from worker.model.spec import Mlp, ModelSpec


@dataclass(frozen=True)
class DenseShape:
    """The sizes of ``spec``. Raises `ValueError` if its layers differ or have experts."""

    spec: ModelSpec

    def __post_init__(self) -> None:
        shapes = {
            (attention.num_heads, attention.num_kv_heads, attention.head_dim)
            for attention in self.spec.attentions
        }
        parts = {layer.feed_forward for layer in self.spec.layers}
        is_mlp = len(parts) == 1 and isinstance(next(iter(parts)), Mlp)
        if len(shapes) != 1 or self.spec.has_states or not is_mlp:
            raise ValueError("the model's layers differ, or are mixtures of experts")

    @classmethod
    def of(cls, config: dict[str, Any]) -> "DenseShape":
        """The sizes of a configuration. Raises `ValueError` if its family is not native."""
        spec = spec_of(config)
        if spec is None:
            raise ValueError(f"{config.get('model_type')} is no native family")
        return cls(spec)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    @property
    def num_heads(self) -> int:
        return self.spec.attentions[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.spec.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.spec.head_dim

    @property
    def intermediate_size(self) -> int:
        part = self.spec.layers[0].feed_forward
        assert isinstance(part, Mlp)
        return part.size

    @property
    def max_seq_len(self) -> int:
        return self.spec.max_seq_len

    def with_layers(self, num_layers: int) -> "DenseShape":
        """The same model with its first layers alone."""
        return DenseShape(replace(self.spec, layers=self.spec.layers[:num_layers]))

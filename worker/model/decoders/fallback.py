"""The transformers fallback: any causal LM of transformers, with our paged attention.

All layers except attention process tokens independently, so a packed step [1, num_tokens] with its
positions is sufficient input. At load time `worker.model.decoders.probe` verifies this for the
model, or rejects the model by its type.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad

from kernels.attention_spec import AttentionSpec
from kernels.providers import Ops, Provider
from shared.errors import StartupError
from worker.model.cache_layout import CacheLayout, KeptTokens, layout_of
from worker.model.decoders import gguf_state, probe
from worker.model.decoders.attention import attend
from worker.model.decoders.interposed import NAME_WITH_MASKS, logits_with
from worker.model.decoders.probe import AttentionShape
from worker.model.forward import Decoder, ForwardInputs, Traits
from worker.model.kv_cache import KVCache
from worker.model.weights.gguf import GgufSource
from worker.model.weights.sources import TensorSource

_OPTIONS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load(
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Callable[[AttentionShape], Ops],
    cache_dtype: torch.dtype | None = None,
) -> "ForeignDecoder":
    """Load a causal LM from safetensors or a GGUF file; no code of the checkpoint is executed.

    ``ops`` chooses the operations once the model's heads are known. Raises `StartupError` if
    weights are missing or the model needs a kind of attention that we do not support.
    """
    model = _model_of(source, _config_of(source.directory), dtype=dtype)
    return ForeignDecoder(model.to(device).eval(), ops, cache_dtype)


def rehearse(source: TensorSource, *, reads_weights: bool) -> None:
    """Raise the `StartupError` with which `load` would refuse a model. Without its weights, which
    are read in 32 bits, its attention is not examined, nor are the shapes in a GGUF file."""
    library: Any = transformers
    verbosity = library.logging.get_verbosity()
    library.logging.set_verbosity_error()  # what matters is in the error
    try:
        config = _config_of(source.directory)
        if reads_weights:
            probe.examine(_model_of(source, config, dtype=torch.float32).eval())
        else:
            _model_of(source, config, device_map={"": "meta"})
    finally:
        library.logging.set_verbosity(verbosity)


def _config_of(directory: Path) -> Any:
    """The configuration of a causal LM. Raises `StartupError`."""
    library: Any = transformers
    try:
        config = library.AutoConfig.from_pretrained(directory, **_OPTIONS)
    except (OSError, ValueError) as error:
        raise StartupError(f"transformers does not support {directory.name}: {error}") from error
    if type(config) not in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise probe.refusal(config, "transformers has no causal language model of this type")
    return config


def _model_of(source: TensorSource, config: Any, **how: Any) -> Any:
    """A causal LM with all its weights. Raises `StartupError`."""
    library: Any = transformers
    library.logging.disable_progress_bar()
    name, kind = source.directory.name, library.AutoModelForCausalLM
    directory: Path | None = source.directory
    if isinstance(source, GgufSource):
        kind, directory = library.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], None
        how["state_dict"] = _state_of(kind, source, config, how.get("dtype"))
    try:
        model, report = kind.from_pretrained(
            directory,
            config=config,
            attn_implementation=NAME_WITH_MASKS,
            use_safetensors=True,
            output_loading_info=True,
            **_OPTIONS,
            **how,
        )
    except KeyError as error:
        # Old modelling code looks up the attention's name in a table of its own.
        raise probe.refusal(config, "its attention cannot be replaced") from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise StartupError(f"transformers cannot load {name}: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise StartupError(f"{name} lacks {len(missing)} weights: {missing[0]}, ...")
    return model


def _state_of(
    kind: Any, source: GgufSource, config: Any, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The weights of a GGUF file for models of the class ``kind``; without a ``dtype``, none are
    read."""
    with torch.device("meta"):
        described = kind(copy.deepcopy(config))
    if dtype is None:
        return gguf_state.hollow_state_of(described, source)
    return gguf_state.state_of(described, source, dtype)


class ForeignDecoder(Decoder):
    """A `Decoder` around a transformers model. Raises `StartupError` if the probe fails."""

    def __init__(
        self,
        model: Any,
        ops: Callable[[AttentionShape], Ops],
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self._cache_dtype = cache_dtype
        self._model = model
        self._shape = probe.examine(model)
        self._ops = ops(self._shape)

    @property
    def traits(self) -> Traits:
        return Traits(numerics="foreign")

    @property
    def num_layers(self) -> int:
        return len(self._shape.layers)

    @property
    def num_kv_heads(self) -> int:
        return self._shape.longest.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self._shape.longest.head_dim

    def cache_layout(self, block_size: int) -> CacheLayout:
        """See `Decoder.cache_layout`."""
        layers = [KeptTokens(*layer.visible, layer.key_size) for layer in self._shape.layers]
        return layout_of(layers, self.max_seq_len, self.provider)

    @property
    def vocab_size(self) -> int:
        return self._shape.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self._shape.max_seq_len

    @property
    def dtype(self) -> torch.dtype:
        return self._shape.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """See `Decoder.cache_dtype`."""
        return self._cache_dtype or self.dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def provider(self) -> Provider:
        return self._ops.provider

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        return logits_with(
            PagedAttentionFunction(self._ops, self._shape, inputs, kv_cache),
            self._model,
            inputs.token_ids,
            inputs.positions,
            inputs.sampled_rows,
        )


@dataclass(frozen=True, slots=True)
class PagedAttentionFunction:
    """The attention of a step, with transformers' interface; its arguments were checked at load
    time."""

    ops: Ops
    shape: AttentionShape
    inputs: ForwardInputs
    kv_cache: KVCache

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _: Tensor | None,
        arguments: dict[str, Any],
    ) -> Tensor:
        index: int = module.layer_idx
        layer, value_dim = self.shape.layers[index], value.shape[-1]
        query, key, value = (
            pad(tensor[0].transpose(0, 1), (0, layer.head_dim - tensor.shape[-1])).contiguous()
            for tensor in (query, key, value)
        )
        layer_cache = self.kv_cache.layer(index, layer.num_kv_heads, layer.head_dim)
        group = self.kv_cache.group(index)
        self.ops.store_kv(key, value, *layer_cache, self.inputs.slots[group])
        sinks = arguments.get("s_aux")
        spec = AttentionSpec(
            scale=layer.scale,
            window=layer.visible.window,
            chunk=layer.visible.chunk,
            softcap=layer.softcap,
            sinks=None if sinks is None else sinks.float(),
        )
        attended = attend(self.ops, self.inputs, group, layer_cache, query, spec)
        return attended[None, ..., :value_dim]

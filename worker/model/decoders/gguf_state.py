"""The weights of transformers' models in GGUF files, for models that our own decoders do not run.

The gguf package knows what llama.cpp calls the tensors of each architecture, and transformers'
processors undo what llama.cpp's converter has done to their values.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.quantized import BLOCKS, QuantizedWeight, dequantize, has_finite_scales
from shared.errors import StartupError
from worker.checkpoints.convert import known_to_transformers
from worker.model.weights.gguf import GgufSource


def state_of(model: Any, source: GgufSource, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a file by their names in ``model.state_dict()``. Packed matrices are expanded
    in memory, one after the other.

    Raises `StartupError` for an architecture that transformers does not read, and for a tensor that
    the model has no place for or that has another shape there.
    """
    processor = _processor_of(model, source)
    places = _places(model, source, processor)
    state: dict[str, Tensor] = {}
    for name in source.names:
        processed = processor.process(
            weights=_floats(source, name).numpy(),
            name=name,
            tensor_key_mapping=places,
            parsed_parameters={"tensors": state},
        )
        if processed.name is not None:  # the processor has put all other tensors into the state
            values = torch.from_numpy(processed.weights)
            state[_place(processed.name, places)] = values.to(dtype).contiguous()
    for place, expected in model.state_dict().items():
        if place in state and state[place].shape != expected.shape:
            raise StartupError(
                f"{place} has shape {tuple(state[place].shape)} in the GGUF file, its metadata "
                f"say {tuple(expected.shape)}"
            )
    return state


def hollow_state_of(model: Any, source: GgufSource) -> dict[str, Tensor]:
    """Like `state_of`, but the tensors are those of ``model``, whose shapes are not compared: only
    names are read."""
    places = _places(model, source, _processor_of(model, source))
    state = model.state_dict()
    named = [_place(name, places) for name in source.names]
    return {place: state[place] for place in named}


def _processor_of(model: Any, source: GgufSource) -> Any:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    if source.architecture not in known_to_transformers():
        raise StartupError(
            f"transformers does not read the tensors of GGUF files of {source.architecture}, and "
            "our own decoders do not know the model's configuration"
        )
    kind: Any = TENSOR_PROCESSORS.get(source.architecture, TensorProcessor)
    return kind(model.config.to_dict())


def _places(model: Any, source: GgufSource, processor: Any) -> Mapping[str, str]:
    """The names in the model, by the names in the file."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    try:
        places: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise StartupError(f"transformers cannot read {source.directory.name}: {error}") from None
    for name in source.names:
        if not {name, _bare(name)} & places.keys():
            raise StartupError(
                f"the GGUF file's tensor {name} has no place in {type(model).__name__} of "
                "transformers"
            )
    return places


def _place(name: str, places: Mapping[str, str]) -> str:
    return places.get(name) or places[_bare(name)]


def _bare(name: str) -> str:
    """The parameters of experts have no suffix in models."""
    return name.removesuffix(".weight")


def _floats(source: GgufSource, name: str) -> Tensor:
    """A tensor in float32. Raises `StartupError` if a scale is not finite."""
    kind, stored = source.kind(name), source.get(name)
    if kind not in BLOCKS:
        return stored.float()
    packed = QuantizedWeight(kind, stored.flatten(0, -3))
    if not has_finite_scales(packed):
        raise StartupError(f"{name} cannot be read as {kind}: a scale is infinite or NaN")
    return dequantize(packed).view(source.shape(name))

"""Tiny models with a predictor, which transformers does not keep."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from tests.support.models.tiny import native_spec, write_tiny_model

PREDICTING = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("glm4_moe", "glm4_moe_lite", "deepseek_v3", "mimo"),
)
"""The families whose checkpoints may have a predictor."""


class Reference(NamedTuple):
    """A model and its predictor, as modules of transformers."""

    model: Any
    layer: Any
    """The model with the layer of the predictor alone, and its final norm."""
    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: Tensor
    """[hidden_size, 2 * hidden_size]."""
    eps: float
    is_hidden_first: bool

    def predicted(self, token_ids: list[int], next_id: int) -> Tensor:
        """The logits [len(token_ids), vocab_size] of the token behind the next token, after each of
        these tokens: section 2.2 of arXiv:2412.19437."""
        size = (len(self.embedding_norm),)
        with torch.inference_mode():
            following = torch.tensor([[*token_ids[1:], next_id]])
            embedded = self.model.get_input_embeddings()(following)
            kept = self.model.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state
            halves = (
                functional.rms_norm(embedded, size, self.embedding_norm, self.eps),
                functional.rms_norm(kept, size, self.hidden_norm, self.eps),
            )
            parts = halves[::-1] if self.is_hidden_first else halves
            joined = torch.cat(parts, dim=-1) @ self.projection.T
            logits: Tensor = self.layer(inputs_embeds=joined, use_cache=False).logits[0]
        return logits

    def double(self) -> "Reference":
        """The same in float64."""
        return Reference(
            copy.deepcopy(self.model).double(),
            copy.deepcopy(self.layer).double(),
            self.embedding_norm.double(),
            self.hidden_norm.double(),
            self.projection.double(),
            self.eps,
            self.is_hidden_first,
        )


def write_predicting_model(
    directory: Path, family: str, *, is_right: bool = False, **overrides: Any
) -> Reference:
    """Write a tiny model with a predictor whose weights are random.

    With ``is_right``, no layer of the model has an effect, so that the most likely token depends on
    the latest token alone, and the predictor predicts it.
    """
    if family == "qwen3_next":  # the layer with attention has experts, as the last layer has
        overrides = {"mlp_only_layers": [0], **overrides}
    model = write_tiny_model(directory, family, **overrides)
    spec = native_spec(json.loads((directory / "config.json").read_text()))
    predictor, size = spec.predictor, spec.hidden_size
    assert predictor is not None
    with_attention = [i for i, layer in enumerate(spec.layers) if layer.attention is not None]
    source = with_attention[-1]
    torch.manual_seed(5)
    other = copy.deepcopy(model)
    vectors = [_plus_random(torch.ones(size), not is_right) for _ in range(3)]
    halves = (torch.eye(size), torch.zeros(size, size))
    projection = torch.cat(halves[::-1] if predictor.is_hidden_first else halves, dim=1)
    with torch.no_grad():
        for parameter in other.model.layers[source].parameters():
            parameter.copy_(_plus_random(parameter, not is_right))
        if is_right:
            for module in (model, other):
                _silence(module)
            save_file(_tensors(model), directory / "model.safetensors")
            vectors[2] = model.model.norm.weight + float(predictor.norm.adds_one)
        else:
            projection = 0.2 * torch.randn(size, 2 * size)
        other.model.norm.weight.copy_(vectors[2] - float(predictor.norm.adds_one))
    _write(directory, other, source)
    other.model.layers = nn.ModuleList([other.model.layers[source]])
    other.config.num_hidden_layers = 1
    other.config.layer_types = ["full_attention"]
    stored = [vector - float(predictor.norm.adds_one) for vector in vectors]
    prefix = "model." if predictor.prefix is None else predictor.prefix
    names = (predictor.embedding_norm, predictor.hidden_norm, predictor.final_norm)
    own = {f"{prefix}{name}.weight": one for name, one in zip(names, stored, strict=True)}
    own[f"{prefix}{predictor.projection}.weight"] = projection
    path = directory / "model.safetensors"
    save_file({**load_file(path), **{name: one.clone() for name, one in own.items()}}, path)
    return Reference(
        model,
        other,
        vectors[0],
        vectors[1],
        projection,
        predictor.norm.eps,
        predictor.is_hidden_first,
    )


def _write(directory: Path, other: Any, source: int) -> None:
    """Add the layer ``source`` of another model to a checkpoint, as the layer of its predictor."""
    spec = native_spec(json.loads((directory / "config.json").read_text()))
    assert spec.predictor is not None
    prefix = "model." if spec.predictor.prefix is None else spec.predictor.prefix
    stem, path = f"model.layers.{source}.", directory / "model.safetensors"
    layer = {
        f"{prefix}{spec.predictor.parent}.{spec.predictor.number}.{name.removeprefix(stem)}": tensor
        for name, tensor in _tensors(other).items()
        if name.startswith(stem)
    }
    save_file({**load_file(path), **layer}, path)


def _tensors(model: Any) -> dict[str, Tensor]:
    """The tensors of a model under the names of its checkpoint."""
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        return load_file(Path(place) / "model.safetensors")


def _plus_random(tensor: Tensor, is_random: bool) -> Tensor:
    return tensor + 0.1 * torch.randn(tensor.shape) if is_random else tensor


def _silence(model: Any) -> None:
    """Let the layers of a model add nothing."""
    for name, parameter in model.model.layers.named_parameters():
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            parameter.zero_()

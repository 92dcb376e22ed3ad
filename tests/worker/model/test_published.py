"""Checkpoints as they are published: configurations, and names and sizes in their index files.

A file in ``published`` has the configuration of a checkpoint, the total size of its tensors in
bytes, and their names. The numbers of layers and experts with the same tensors are one range, such
as ``layers.[0-3,5]``. An index file has no shapes: the shapes are those of transformers' model with
that configuration, and the sum of the sizes must be the published size, which is null if it
includes the headers of the files.
"""

import itertools
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from worker.model.loading import rehearse

Shape = tuple[int, ...]

PUBLISHED = sorted((Path(__file__).parent / "published").glob("*.json"))
_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I64": 8, "U8": 1}
_FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_RANGES = re.compile(r"\[([\d,-]+)\]")
_LIKE = {"mimo": "qwen2"}
"""Families that transformers lacks, and families with the same layers."""
_OTHER_NAMES = (
    ("", ""),
    ("", "transformer."),
    ("model.language_model.", "model."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.mtp_layers.0.", "model.layers.0."),
)
_FILE_BYTES = 4 << 30
_BLOCK = 32
"""The weights that share a scale in the packed checkpoints."""


def names_in(pattern: str) -> Iterator[str]:
    parts = _RANGES.split(pattern)
    for at in range(1, len(parts), 2):
        bounds = [numbers.split("-") for numbers in parts[at].split(",")]
        numbers = [n for bound in bounds for n in range(int(bound[0]), int(bound[-1]) + 1)]
        parts[at] = numbers
    choices = [[part] if isinstance(part, str) else part for part in parts]
    return ("".join(map(str, chosen)) for chosen in itertools.product(*choices))


def shapes_by_transformers(config: dict[str, Any]) -> dict[str, Shape]:
    """The shapes of all tensors by their published names."""
    own = {key: value for key, value in config.items() if key != "quantization_config"}
    family = own.pop("model_type")
    kind = _LIKE.get(family, family)
    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with torch.device("meta"):
        model = getattr(transformers, classes[kind])(AutoConfig.for_model(kind, **own))
    tensors = revert_weight_conversion(model, model.state_dict())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return shapes | _of_predictors(config) if family == "mimo" else shapes


def _of_predictors(config: Mapping[str, Any]) -> dict[str, Shape]:
    """What MiMo's layers that predict further tokens have beside an ordinary layer."""
    size, stem = config["hidden_size"], "model.mtp_layers.0"
    norms = {f"{stem}.{name}_layernorm.weight": (size,) for name in ("final", "hidden", "token")}
    return {f"{stem}.input_proj.weight": (size, 2 * size), **norms}


def as_stored(name: str, shapes: Mapping[str, Shape], floats: str) -> tuple[str, Shape]:
    """The type and the shape of a published tensor, whose floats have the type ``floats``."""
    for published, ours in _OTHER_NAMES:
        if (shape := shapes.get(name.replace(published, ours, 1))) is not None:
            return floats, shape
    whole, _, part = name.rpartition("_")
    if whole.endswith("_proj"):  # MXFP4: [experts, inputs, outputs] is stored by output
        experts, inputs, outputs = shapes[whole]
        blocks = (experts, outputs, inputs // _BLOCK)
        return "U8", (*blocks, _BLOCK // 2) if part == "blocks" else blocks
    outputs, inputs = _matrix(whole, shapes)
    return {
        "packed": ("I32", (outputs, inputs // 8)),
        "scale": (floats, (outputs, inputs // _BLOCK)),
        "shape": ("I64", (2,)),
    }[part]


def _matrix(name: str, shapes: Mapping[str, Shape]) -> Shape:
    """The shape of a matrix, which may be that of a single expert whose model stacks them."""
    if name in shapes:
        return shapes[name]
    before, _, matrix = name.partition(".experts.")
    is_down = "down_proj" in matrix
    _, outputs, inputs = shapes[f"{before}.experts.{'down_proj' if is_down else 'gate_up_proj'}"]
    return (outputs if is_down else outputs // 2, inputs)


def write_hollow(directory: Path, published: dict[str, Any], shapes: Mapping[str, Shape]) -> int:
    """A checkpoint of several files, which have no data but the shapes that some formats store.

    Returns the size of its tensors in bytes.
    """
    config = published["config"]
    floats = _FLOATS[config.get("dtype") or config.get("torch_dtype") or "bfloat16"]
    names = [name for pattern in published["tensors"] for name in names_in(pattern)]
    files: list[_Hollow] = [_Hollow()]
    for name in names:
        kind, shape = as_stored(name, shapes, floats)
        if files[-1].end > _FILE_BYTES:
            files.append(_Hollow())
        files[-1].add(name, kind, shape, _content(name, shapes))
    for number, file in enumerate(files):
        file.write(directory / f"model-{number}.safetensors")
    index = {
        name: f"model-{at}.safetensors" for at, file in enumerate(files) for name in file.header
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config))
    return sum(file.end for file in files)


def _content(name: str, shapes: Mapping[str, Shape]) -> bytes:
    whole, _, part = name.rpartition("_")
    return struct.pack("<2q", *_matrix(whole, shapes)) if part == "shape" else b""


class _Hollow:
    """A file of safetensors without most of its data."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.end = 0
        self._contents: dict[int, bytes] = {}

    def add(self, name: str, kind: str, shape: Shape, content: bytes) -> None:
        begin, self.end = self.end, self.end + _BYTES[kind] * math.prod(shape)
        self.header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, self.end]}
        if content:
            self._contents[begin] = content

    def write(self, path: Path) -> None:
        text = json.dumps(self.header).encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            begin = file.tell()
            for offset, content in self._contents.items():
                file.seek(begin + offset)
                file.write(content)
            file.truncate(begin + self.end)


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_a_published_checkpoint_has_what_is_read(file: Path, tmp_path: Path) -> None:
    published = json.loads(file.read_bytes())
    num_bytes = write_hollow(tmp_path, published, shapes_by_transformers(published["config"]))

    runs = rehearse(tmp_path)

    assert runs == "natively"
    assert published["total_size"] in (num_bytes, None)

"""GGUF files of models that run through transformers' modules."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from shared.errors import StartupError
from tests.worker.checkpoints.gguf_files import FOREIGN, write_tiny_gguf
from tests.worker.checkpoints.gguf_models import write_gguf
from tests.worker.model.decoders.test_fallback import (
    MAX_RELATIVE_ERROR,
    SEQUENCE_LENS,
    VOCAB_SIZE,
    load,
    paged_logits,
    relative_error,
    tiny_model,
)
from worker.checkpoints import convert
from worker.checkpoints.gguf_file import write_file_list
from worker.model.loading import load_decoder, rehearse

MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "stablelm": {"hidden_size": 64, "intermediate_size": 96, "use_qkv_bias": True},
}
"""The models whose files transformers reads and whose modules our attention can serve."""


def described(path: Path) -> Path:
    """The directory of a file's configuration, from which a worker loads it."""
    directory = path.with_suffix("")
    directory.mkdir()
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with convert._read(path) as reader:
        convert._write_config(source, reader, directory)
    write_file_list(directory, [path])
    return directory


def logits_of(model: Any, sequences: list[Tensor]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(ids[None], use_cache=False).logits[0] for ids in sequences]


def random_sequences() -> list[Tensor]:
    return [torch.randint(1, VOCAB_SIZE, (length,)) for length in SEQUENCE_LENS]


@pytest.mark.parametrize("architecture", MODELS)
def test_a_file_computes_what_the_model_computes_that_it_is_made_of(
    tmp_path: Path, architecture: str
) -> None:
    model = tiny_model(architecture, **MODELS[architecture])
    model.save_pretrained(tmp_path)
    path = write_gguf(tmp_path, tmp_path / "tiny.gguf", architecture)
    sequences = random_sequences()

    logits = paged_logits(load(described(path)), sequences)

    expected = logits_of(model, sequences)
    errors = [relative_error(a, b) for a, b in zip(logits, expected, strict=True)]
    assert max(errors) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q5_1])
def test_packed_matrices_are_those_that_transformers_reads(tmp_path: Path, kind: Kind) -> None:
    tiny_model("stablelm", **MODELS["stablelm"]).save_pretrained(tmp_path)
    path = write_gguf(tmp_path, tmp_path / "tiny.gguf", "stablelm", kind_of=lambda name: kind)
    sequences = random_sequences()

    logits = paged_logits(load(described(path)), sequences)

    models: Any = transformers.AutoModelForCausalLM
    theirs = models.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    expected = logits_of(theirs, sequences)
    errors = [relative_error(a, b) for a, b in zip(logits, expected, strict=True)]
    assert max(errors) < MAX_RELATIVE_ERROR


def test_a_worker_serves_a_file_and_writes_no_weights(tmp_path: Path) -> None:
    directory = described(write_tiny_gguf(tmp_path / "tiny.gguf", Kind.Q8_0, architecture=FOREIGN))

    decoder = load_decoder(directory, device=torch.device("cpu"))

    assert (decoder.traits.numerics, decoder.dtype) == ("foreign", torch.bfloat16)
    assert rehearse(directory) == "through transformers"
    assert {path.name for path in directory.iterdir()} == {
        "config.json",
        "generation_config.json",
        "gguf-files.json",
    }


def add_bias(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.ffn_up.bias", torch.zeros(96).numpy())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": "blk.1.ffn_down.weight"}, "lacks 1 weights: model.layers.1.mlp.down_proj"),
        ({"add": add_bias}, "tensor blk.0.ffn_up.bias has no place in StableLmForCausalLM"),
    ],
)
@pytest.mark.parametrize("reads_weights", [True, False])
def test_a_file_with_other_tensors_than_the_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, reads_weights: bool
) -> None:
    from worker.model.decoders import fallback
    from worker.model.weights.sources import open_source

    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture=FOREIGN, **changes)
    source = open_source(described(path), has_data=reads_weights)

    with pytest.raises(StartupError, match=re.escape(message)):
        fallback.rehearse(source, reads_weights=reads_weights)


def changed_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_tensors_of_other_sizes_than_the_metadata_say_are_refused(tmp_path: Path) -> None:
    directory = described(write_tiny_gguf(tmp_path / "tiny.gguf", architecture=FOREIGN))
    changed_config(directory, lambda config: config.update(intermediate_size=80))

    with pytest.raises(StartupError, match=r"mlp\.gate_proj\.weight has shape \(96, 64\)"):
        rehearse(directory)


def test_an_architecture_that_nobody_reads_is_refused_by_name(tmp_path: Path) -> None:
    directory = described(write_tiny_gguf(tmp_path / "tiny.gguf", architecture=FOREIGN))
    other = write_tiny_gguf(tmp_path / "other.gguf", architecture="grok")
    write_file_list(directory, [other])

    with pytest.raises(StartupError, match="does not read the tensors of GGUF files of grok"):
        rehearse(directory)

"""What a checkpoint's headers say is wrong with it, before its weights are read."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import StartupError
from tests.support.models.tiny import FAMILIES, write_tiny_model
from worker.model.loading import load_decoder, rehearse

Tensors = dict[str, Tensor]
MATRIX = re.compile(r"(?:layers|blocks|h)\.1\..*(?:proj|dense)")
"""A part of the names of matrices of the second layer."""
NORM = re.compile(r"norm(?:_\w)?\.weight$")


def told_by(load: Callable[[], object]) -> str:
    with pytest.raises(StartupError) as refused:
        load()
    return str(refused.value)


def without_a_matrix(tensors: Tensors) -> None:
    del tensors[next(name for name in sorted(tensors) if MATRIX.search(name))]


def with_a_narrow_norm(tensors: Tensors) -> None:
    name = next(name for name in sorted(tensors) if NORM.search(name))
    tensors[name] = tensors[name][:-1].clone()


def with_an_unknown_matrix(tensors: Tensors) -> None:
    tensors["model.layers.0.unknown.weight"] = torch.zeros(2, 3)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_rehearsal_says_what_loading_would(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    assert rehearse(tmp_path) == "natively"

    for damage in (without_a_matrix, with_a_narrow_norm, with_an_unknown_matrix):
        tensors = dict(stored)
        damage(tensors)
        save_file(tensors, file)

        said = told_by(lambda: rehearse(tmp_path))

        assert said == told_by(lambda: load_decoder(tmp_path, device=torch.device("cpu")))


def test_a_rehearsal_reads_no_weights(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    with file.open("wb") as hollow:
        hollow.write(content[:header])
        hollow.truncate(len(content))

    assert rehearse(tmp_path) == "natively"


def test_a_width_that_blocks_cannot_have_is_found(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", hidden_size=48, intermediate_size=64)

    said = told_by(lambda: rehearse(tmp_path, "q4_0"))

    assert "has 48 inputs, q4_0 needs a multiple of 32" in said
    assert said == told_by(
        lambda: load_decoder(tmp_path, weight_format="q4_0", device=torch.device("cpu"))
    )


def test_a_head_that_a_tied_model_stores_is_checked(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.zeros(3, 5)
    save_file(tensors, file)

    assert "lm_head.weight has shape (3, 5)" in told_by(lambda: rehearse(tmp_path))


def test_a_shard_that_the_index_lacks_is_found(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    lost = max(listed["weight_map"].values())
    listed["weight_map"] = {
        name: shard for name, shard in listed["weight_map"].items() if shard != lost
    }
    index.write_text(json.dumps(listed))
    shutil.move(tmp_path / lost, tmp_path / "elsewhere")

    assert "the checkpoint has no tensor" in told_by(lambda: rehearse(tmp_path))

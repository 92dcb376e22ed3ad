"""A GGUF file served from itself computes what transformers computes from it."""

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from shared.errors import StartupError
from tests.support.models.batches import batch, share
from tests.support.models.numerics import assert_close
from tests.worker.checkpoints.gguf_files import write_tiny_gguf
from worker.checkpoints.convert import convert
from worker.checkpoints.gguf_file import read_header, write_file_list
from worker.model.forward import Decoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.loading import fingerprint, load_decoder, rehearse

CPU = torch.device("cpu")
PROMPT = [(7 * i) % 131 for i in range(20)]


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration and the tokenizer of each tiny file: they differ in their weights alone."""
    directory = tmp_path_factory.mktemp("description")
    convert(write_tiny_gguf(directory / "tiny.gguf"), directory)
    return directory


def served_from(path: Path, description: Path) -> Path:
    """The directory from which a worker loads this file."""
    directory = path.with_suffix("")
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(description / name, directory)
    write_file_list(directory, [path])
    return directory


def logits_of(decoder: Decoder) -> torch.Tensor:
    """The logits of the prompt's last token."""
    block = BlockShape(decoder.num_layers, 8, decoder.num_kv_heads, decoder.head_dim, decoder.dtype)
    inputs = build_inputs(batch(share(PROMPT, range(3))), 8, decoder.device).forward
    with torch.inference_mode():
        return decoder.forward(inputs, KVCache.allocate(block, 3, decoder.device)).clone()


def expected_logits(path: Path) -> torch.Tensor:
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1:]
    return logits


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_1, Kind.Q4_0])
def test_it_computes_what_transformers_does(tmp_path: Path, description: Path, kind: Kind) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", kind)
    directory = served_from(path, description)
    expected = expected_logits(path)
    for kernels in ("native-int16", "reference"):
        decoder = load_decoder(directory, dtype="float32", device=CPU, kernels=kernels)
        assert_close(logits_of(decoder), expected, 1e-4)
    assert rehearse(directory) == "natively"


def test_float16_matrices_run_on_the_native_kernels(tmp_path: Path, description: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", Kind.F16)
    decoder = load_decoder(served_from(path, description), device=CPU)
    assert (decoder.dtype, decoder.provider) == (torch.bfloat16, "native")


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_scale_that_is_infinite_is_refused_by_the_name_of_its_matrix(
    tmp_path: Path, description: Path, kernels: str
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)
    start = read_header(path).tensors["blk.1.ffn_down.weight"].start
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\x00\x7c")

    with pytest.raises(StartupError, match=r"blk\.1\.ffn_down\.weight .*: a scale is infinite"):
        load_decoder(served_from(path, description), device=CPU, kernels=kernels)


def test_the_fingerprint_is_that_of_the_file_wherever_it_lies(
    tmp_path: Path, description: Path
) -> None:
    digests = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / folder).mkdir()
        path = write_tiny_gguf(tmp_path / folder / "tiny.gguf", Kind.Q8_0, seed)
        digests.append(fingerprint(served_from(path, description)))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("without", ["blk.1.ffn_down.weight", "blk.0.attn_norm.weight"])
def test_a_file_without_a_tensor_is_refused_by_its_name(
    tmp_path: Path, description: Path, without: str
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", without=without)
    directory = served_from(path, description)
    for load in (rehearse, partial(load_decoder, device=CPU)):
        with pytest.raises(StartupError, match=f"no tensor {re.escape(without)}"):
            load(directory)

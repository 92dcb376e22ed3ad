"""How a runner is loaded, and what prevents its start."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import StartupError
from shared.host_memory import free_bytes, readable_size
from tests.support.models.tiny import VOCAB_SIZE, write_tiny_model
from worker.model.loading import (
    WeightRoom,
    fingerprint,
    load_decoder,
    load_runner,
    memory_remedy,
    refuse_foreign_kernels,
    room_for_weights,
    sequence_memory_of,
)
from worker.model.start import RunnerLimits


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    write_tiny_model(directory, "llama", hidden_size=48, head_dim=8)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may corrupt."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def test_a_runner_is_as_large_as_it_was_asked_to_be(model: Path) -> None:
    runner = load_runner(
        model,
        RunnerLimits(block_size=8, max_num_seqs=3, max_seq_len=50),
        device="cpu",
        compute_threads=2,
    )
    runner.close()
    assert (runner.block_size, runner.num_blocks) == (8, 3 * 7)
    assert (runner.vocab_size, runner.max_seq_len) == (VOCAB_SIZE, 50)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "qwen3_5_text", "mamba2"])
def test_the_memory_of_a_sequence_is_known_before_a_runner_starts(
    family: str, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, family)
    length = 128
    memory = sequence_memory_of(tmp_path, length, device="cpu")
    limits = RunnerLimits(max_seq_len=length, kv_cache_bytes=3 * memory.total)

    runner = load_runner(tmp_path, limits, device="cpu", compute_threads=1)

    runner.close()
    assert runner.facts()["kv_cache_sequences"] == 3


def test_states_take_the_same_memory_at_any_length(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3_5_text")

    short, long = (sequence_memory_of(tmp_path, length) for length in (64, 128))

    assert short.states == long.states > 0
    assert long.tokens == 2 * short.tokens > 0


def test_a_sequence_is_no_longer_than_the_cache_unless_that_was_asked_for(model: Path) -> None:
    runner = load_runner(model, RunnerLimits(kv_cache_bytes=10_000), device="cpu", dtype="float32")
    runner.close()
    assert runner.max_seq_len == runner.num_blocks * 16 < 256
    limits = RunnerLimits(kv_cache_bytes=10_000, max_seq_len=200)
    with pytest.raises(
        StartupError, match=f"is 200, but the KV cache holds {runner.max_seq_len} tok"
    ):
        load_runner(model, limits, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (RunnerLimits(max_seq_len=257), "max_seq_len is 257, but the model supports 256"),
        (RunnerLimits(kv_cache_bytes=10), "the KV cache needs .*: raise --kv-cache-bytes"),
        (RunnerLimits(kv_cache_bytes=10_000, max_seq_len=200), "is 200, but the KV cache holds"),
    ],
)
def test_what_the_configuration_does_not_suffice_for_is_refused_before_weights_are_read(
    model: Path, limits: RunnerLimits, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(StartupError, match=message):
        load_runner(model, limits, device="cpu")

    assert "weights read" not in caplog.text


@pytest.mark.parametrize(
    "field",
    [
        {"is_causal": False},
        {"use_bidirectional_attention": True},
        {"text_config": {"use_bidirectional_attention": "all"}},
    ],
)
def test_a_model_whose_tokens_attend_to_later_ones_is_refused(
    model: Path, field: dict[str, Any]
) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | field))

    with pytest.raises(StartupError, match="attention is not causal"):
        load_runner(model, device="cpu")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 4}, "2 heads share 4 key-value heads"),
        ({"num_attention_heads": 9, "num_key_value_heads": 4}, "9 heads share 4 key-value heads"),
        ({"num_attention_heads": 0}, "says num_attention_heads 0, which no model"),
        ({"num_key_value_heads": 0}, "says num_key_value_heads 0, which no model"),
        ({"num_key_value_heads": -1}, "says num_key_value_heads -1, which no model"),
        ({"num_hidden_layers": 0}, "says num_hidden_layers 0, which no model"),
        ({"hidden_size": -48}, "says hidden_size -48, which no model"),
        ({"intermediate_size": 1.5}, r"says intermediate_size 1\.5, which no model"),
        ({"vocab_size": None}, "says vocab_size None, which no model"),
        ({"head_dim": 0}, "says head_dim 0, which no model"),
        ({"max_position_embeddings": "256"}, "says max_position_embeddings '256', which no model"),
    ],
)
def test_sizes_that_no_model_can_have_are_refused(
    model: Path, sizes: dict[str, Any], message: str
) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))

    with pytest.raises(StartupError, match=message):
        load_runner(model, device="cpu")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_auto_is_that_of_the_stored_weights(model: Path, stored: torch.dtype) -> None:
    path = model / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(path).items()}, path)
    decoder = load_decoder(model, dtype="auto", device=torch.device("cpu"))
    assert decoder.dtype == stored


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dtype", "int8", "dtype 'int8' is not one of auto, float32, bfloat16, float16"),
        ("device", "toaster", "there is no device 'toaster'"),
        ("device", "meta", "device 'meta' is not supported"),
        ("device", "cuda:63", "torch finds no device 'cuda:63'"),
    ],
)
def test_an_option_that_cannot_work_is_named(
    model: Path, option: str, value: str, message: str
) -> None:
    options: dict[str, Any] = {"device": "cpu", option: value}
    with pytest.raises(StartupError, match=message):
        load_runner(model, **options)


def test_pickled_weights_are_never_read(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(StartupError, match=r"no model\.safetensors"):
        load_runner(model, device="cpu")


def test_broken_files_are_named(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(StartupError, match=r"model\.safetensors cannot be read"):
        load_runner(model, device="cpu")
    (model / "config.json").write_text("{")
    with pytest.raises(StartupError, match=r"config\.json is not valid JSON"):
        load_runner(model, device="cpu")
    (model / "config.json").unlink()
    with pytest.raises(StartupError, match=r"no config\.json"):
        load_runner(model, device="cpu")


@pytest.mark.parametrize("norm", [torch.tensor(1.0), torch.ones(1, 48)])
def test_a_tensor_with_another_number_of_dimensions_is_named(model: Path, norm: Tensor) -> None:
    path = model / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": norm}, path)

    with pytest.raises(StartupError, match=r"model\.norm\.weight has shape \(.*\), .* \(48,\)"):
        load_runner(model, device="cpu")


def test_weights_of_which_none_is_a_float_are_refused(model: Path) -> None:
    save_file({"model.norm.weight": torch.ones(48).int()}, model / "model.safetensors")

    with pytest.raises(StartupError, match="no weights of a float type"):
        load_runner(model, device="cpu")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "contains no JSON object"),
        ('{"weight_map": {"model.norm.weight": 1}}', "Expected `str`, got `int`"),
    ],
)
def test_an_index_that_lists_no_files_is_refused(model: Path, index: str, message: str) -> None:
    (model / "model.safetensors.index.json").write_text(index)

    with pytest.raises(StartupError, match=rf"model\.safetensors\.index\.json .*{message}"):
        load_runner(model, device="cpu")


def test_an_index_cannot_lead_out_of_the_directory(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "../outside.safetensors"}}')
    with pytest.raises(StartupError, match=r"outside\.safetensors cannot be read"):
        load_runner(model, device="cpu")


def test_a_family_that_is_not_native_goes_through_transformers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "phi")
    runner = load_runner(tmp_path, RunnerLimits(max_num_seqs=1), device="cpu")
    runner.close()
    assert (runner.vocab_size, runner.max_seq_len) == (VOCAB_SIZE, 256)


def test_copies_have_one_fingerprint_and_any_change_gives_another(
    original: Path, model: Path
) -> None:
    expected = fingerprint(original)
    assert fingerprint(model) == expected
    assert fingerprint(model, "q8_0") != expected
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(model) != expected
    shutil.copy(original / "model.safetensors", model)
    assert fingerprint(model) == expected
    (model / "tokenizer.json").write_text("{ }")
    assert fingerprint(model) != expected


def test_an_installed_distribution_named_kernels_stops_the_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_foreign_kernels()
    info = tmp_path / "kernels-0.11.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.11.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StartupError, match=r"kernels 0\.11\.1 is installed"):
        load_runner(model, device="cpu")


def test_weights_that_no_memory_holds_stop_the_start_before_they_are_read(tmp_path: Path) -> None:
    num_bytes = free_bytes() // 8 * 6  # of weights in 16 bits, which are to be served in 32
    tensor = {"dtype": "BF16", "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)  # a hole, which takes no room
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_act": "silu"}')

    with pytest.raises(
        StartupError, match=f"the weights need {readable_size(2 * num_bytes)} .* --weigh"
    ):
        load_decoder(tmp_path, dtype="float32", device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "bytes_per_weight", "can_pack", "remedy"),
    [
        ("cpu", 4, True, "--weight-format q4_1, --dtype bfloat16, a smaller --model, or a machine"),
        ("cpu", 2, True, "--weight-format q4_1, a smaller --model, or a machine"),
        ("cpu", 2, False, "a smaller --model, or a machine or container with more memory"),
        ("cpu", 20 / 32, True, "a smaller --model, or a machine or container with more memory"),
        ("cuda:1", 4, True, "--dtype bfloat16, a smaller --model, or a GPU with more memory"),
        ("cuda:1", 2, True, "a smaller --model, or a GPU with more memory"),
    ],
)
def test_too_little_memory_for_the_weights_is_named_with_the_options_that_help(
    device: str, bytes_per_weight: float, can_pack: bool, remedy: str
) -> None:
    num_bytes, chosen = 3 << 29, torch.device(device)
    advice = memory_remedy(chosen, bytes_per_weight, can_pack=can_pack)
    need = f"the weights need 1.50 GiB of memory on {device}"

    with (
        pytest.raises(StartupError, match=f"^{need}, but 512.0 MiB are free: try {remedy}"),
        room_for_weights(WeightRoom(num_bytes, 1 << 29, advice), chosen),
    ):
        pytest.fail("loaded")
    for error in (MemoryError(), torch.OutOfMemoryError()):
        with (
            pytest.raises(StartupError, match=f"^{need}, and more while .* 2.00 GiB .*{remedy}"),
            room_for_weights(WeightRoom(num_bytes, 1 << 31, advice), chosen),
        ):
            raise error


def test_a_cache_that_no_memory_holds_stops_the_start_before_weights_are_read(
    tmp_path: Path,
) -> None:
    limits = RunnerLimits(kv_cache_bytes=2 * free_bytes())

    with pytest.raises(StartupError, match=r"bytes of memory that are free on cpu: .*kv-cache"):
        load_runner(tmp_path, limits, device="cpu")

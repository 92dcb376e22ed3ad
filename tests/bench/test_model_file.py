"""Files of random weights have the formats that llama-quantize chooses, and are served."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import typer
from gguf import GGMLQuantizationType as Kind

from bench.checks import check_finite
from bench.comparison import Setting, own_client
from bench.servers import running
from bench.serving import files_of
from bench.shapes.catalogue import SHAPES
from bench.shapes.model_file import model_file, random_matrix, write_model
from bench.systems import gguf_weights, warren_serve
from worker.checkpoints.cache import cache_directory
from worker.checkpoints.gguf_file import end_of, read_header

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 12,
    "num_hidden_layers": 16,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
HYBRID: dict[str, Any] = TINY | {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
EXPERTS: dict[str, Any] = TINY | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
BIASED_EXPERTS: dict[str, Any] = TINY | {
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
}
TOKENIZER = {
    "model": {"vocab": {"b": 1, "a": 0, "ab": 2}, "merges": [["a", "b"]]},
    "added_tokens": [{"id": 0, "content": "a"}],
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (directory / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return directory


@pytest.fixture
def cache(tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of models without any, with the libraries of the user's cache."""
    libraries = cache_directory() / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    libraries.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache_directory().mkdir(parents=True)
    (cache_directory() / "native").symlink_to(libraries)
    return cache_directory()


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.Q8_0, Kind.Q4_1, Kind.BF16])
def test_random_weights_have_a_mean_of_0_and_the_usual_deviation(kind: Kind) -> None:
    matrix = random_matrix(np.random.default_rng(0), 512, 1024, kind)

    found = gguf.dequantize(matrix, kind)

    assert found.shape == (512, 1024)
    assert np.isfinite(found).all()
    assert abs(found.mean()) < 1e-3
    assert found.std() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize(
    ("is_tied", "weights", "kinds"),
    [
        # 8 of 16 layers are improved: two at each end, and 4, 7, 10 and 13.
        (True, "Q4_K_M", {"q4_k": 7 * 16 - 2 * 8, "q6_k": 2 * 8 + 1}),
        (False, "Q4_K_M", {"q4_k": 7 * 16 - 2 * 8 + 1, "q6_k": 2 * 8 + 1}),
        (True, "Q4_1", {"q4_1": 7 * 16, "q6_k": 1}),
        (False, "Q8_0", {"q8_0": 7 * 16 + 2}),
        (True, "BF16", {"BF16": 7 * 16 + 1}),
    ],
)
def test_matrices_have_the_formats_that_llama_quantize_chooses(
    tmp_path: Path, tokenizer: Path, is_tied: bool, weights: str, kinds: dict[str, int]
) -> None:
    path = tmp_path / "tiny.gguf"

    write_model(path, TINY | {"tie_word_embeddings": is_tied}, weights, tokenizer)

    header = read_header(path)
    stored = [gguf_kind(tensor.kind) for tensor in header.tensors.values() if len(tensor.shape) > 1]
    assert Counter(stored) == kinds
    assert header.tensors["blk.15.ffn_down.weight"].shape == (256, 512)
    assert header.tensors["blk.15.attn_k_norm.weight"].shape == (64,)
    assert max(map(end_of, header.tensors.values())) == path.stat().st_size
    assert gguf_weights(path) == {"BF16": "bfloat16"}.get(weights, weights.lower())


def gguf_kind(number: int) -> str:
    name = Kind(number).name
    return name if name == "BF16" else name.lower()


def test_a_vocabulary_is_filled_with_tokens_that_have_a_text(
    tmp_path: Path, tokenizer: Path
) -> None:
    path = tmp_path / "tiny.gguf"

    write_model(path, TINY, "Q8_0", tokenizer)

    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens == ["a", "b", "ab", *(f"unused{token}" for token in range(3, 12))]
    assert fields["tokenizer.ggml.token_type"].contents() == [3, *[1] * 11]
    assert fields["tokenizer.ggml.merges"].contents() == ["a b"]


def test_equal_arguments_give_equal_files(tmp_path: Path, tokenizer: Path) -> None:
    for name in ("one.gguf", "other.gguf"):
        write_model(tmp_path / name, TINY, "Q4_K_M", tokenizer)

    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()


@pytest.mark.parametrize(
    ("change", "weights", "error"),
    [
        ({}, "Q3_K", "Q3_K is none of the weights Q4_K_M, Q4_1, Q8_0, BF16"),
        ({"model_type": "mamba2"}, "Q8_0", "family mamba2, only for llama, qwen3"),
        (
            {"model_type": "qwen3_5_text"},
            "Q4_K_M",
            "qwen3_5_text, whose mix of formats is not known",
        ),
        ({"hidden_size": 320}, "Q4_K_M", "token_embd.weight, 12 x 320, has no whole blocks of 256"),
        ({"vocab_size": 2}, "Q8_0", "2 tokens are fewer than the 3 of the tokenizer"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, tokenizer: Path, change: dict[str, Any], weights: str, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        write_model(tmp_path / "tiny.gguf", TINY | change, weights, tokenizer)


@pytest.mark.parametrize(
    ("shape", "error"), [("gpt-oss-120b", "llama-3.2-1b"), ("Llama-3.2-1B", "Q3_K is none")]
)
def test_an_unknown_shape_or_format_is_refused(smollm2: Path, shape: str, error: str) -> None:
    with pytest.raises(typer.BadParameter, match=error):
        files_of(shape, ["Q3_K"], layers=1)


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3-4B", "Llama-3.1-8B", "Qwen3.5-0.8B"])
def test_published_shapes_have_whole_blocks(name: str) -> None:
    config = SHAPES[name].config

    assert config["hidden_size"] % 256 == config["intermediate_size"] % 256 == 0
    assert config["num_hidden_layers"] >= SHAPES[name].num_layers


@pytest.mark.parametrize(
    ("config", "weights", "name", "shape"),
    [
        (HYBRID, "Q8_0", "blk.0.attn_qkv.weight", (512, 256)),
        (EXPERTS, "Q8_0", "blk.0.ffn_up_exps.weight", (4, 64, 256)),
        (EXPERTS | {"moe_intermediate_size": 256}, "Q4_K_M", "blk.0.ffn_gate_inp.weight", (4, 256)),
        (BIASED_EXPERTS, "BF16", "blk.1.ffn_down_exps.bias", (4, 256)),
    ],
    ids=["recurrences", "experts", "experts of K-quants", "experts with biases"],
)
def test_shapes_of_other_layers_are_read(
    cache: Path,
    smollm2: Path,
    config: dict[str, Any],
    weights: str,
    name: str,
    shape: tuple[int, ...],
) -> None:
    file = model_file("tiny", config | {"vocab_size": 49_160}, weights, smollm2)

    check_finite(file)

    assert read_header(file).tensors[name].shape == shape


def test_a_shape_is_served_and_measured(cache: Path, smollm2: Path) -> None:
    config = TINY | {"model_type": "llama", "vocab_size": 49_160, "num_hidden_layers": 2}
    file = model_file("tiny", config, "Q4_K_M", smollm2)
    written = file.stat().st_mtime_ns

    check_finite(file)
    with running(warren_serve(gguf_weights(file), ["--compute-threads=1"], file)) as server:
        setting = Setting(num_users=1, num_requests=2, prompt_len=24, max_tokens=8, seed=0)
        figures = own_client(server.url, setting)

    assert figures.tokens_per_s > 0
    assert figures.ttft_p50_ms > 0
    assert model_file("tiny", config, "Q4_K_M", smollm2).stat().st_mtime_ns == written
    assert file.is_relative_to(cache)

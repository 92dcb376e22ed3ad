"""Drawn configurations and checkpoints of all native families, against transformers: the same
numbers, or refused by name.

WARREN_TEST_VARIATIONS draws more of them.
"""

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shared.errors import StartupError
from tests.support.models.batches import batch, share
from tests.support.models.numerics import relative_error
from tests.support.models.tiny import (
    native_spec,
    reference_logits,
    write_tiny_model,
)
from worker.model.config import read_json_config
from worker.model.decoders.rope_table import rope_table
from worker.model.inputs import build_inputs
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.loading import load_decoder
from worker.model.spec import ModelSpec

NUM_DRAWN = int(os.environ.get("WARREN_TEST_VARIATIONS", "100"))
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_type": "default"},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 2},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"type": "yarn", "factor": 2.0, "beta_fast": None, "mscale": 0.7, "mscale_all_dim": 1.1},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")


def drawn_config(draw: Random) -> dict[str, Any]:
    """A configuration some of whose keys are missing, null, or spelled in two ways."""
    config: dict[str, Any] = {"model_type": draw.choice(LLAMA_LIKE), "hidden_act": "silu", **SIZES}
    optional: dict[str, list[Any]] = {
        "rms_norm_eps": [1e-5],
        "head_dim": [8, 16],
        "num_key_value_heads": [1, 2, None],
        "tie_word_embeddings": [True, False],
        "sliding_window": [5, None],
        "use_sliding_window": [True, False],
        "max_window_layers": [0, 1, 2],
        "layer_types": [None, ["full_attention", "sliding_attention"]],
        "attention_bias": [True, False],
        "mlp_bias": [True, False],
        "rope_theta": [5000.0],
        "original_max_position_embeddings": [16],
        "max_position_embeddings": [128, 64],
    }
    for key, values in optional.items():
        if draw.random() < 0.4:
            config[key] = draw.choice(values)
        elif draw.random() < 0.5:
            config.pop(key, None)
    if draw.random() < 0.1:
        del config["hidden_act"]
    for key in ("rope_scaling", "rope_parameters"):
        if draw.random() < 0.5:
            config[key] = dict(draw.choice(ROPES))
            if draw.random() < 0.5:
                config[key]["rope_theta"] = draw.choice([10_000.0, 2000.0])
    return config


def assert_same(ours: ModelSpec, theirs: Any) -> None:
    assert ours.final_norm.eps == theirs.rms_norm_eps
    heads, size = theirs.num_attention_heads, theirs.hidden_size
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or size // heads)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.has_tied_embeddings == bool(theirs.tie_word_embeddings)
    window = getattr(theirs, "sliding_window", None) if theirs.model_type != "llama" else None
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    if theirs.model_type == "mistral":
        kinds = ["sliding_attention"] * theirs.num_hidden_layers
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [attention.window for attention in ours.attentions] == windows


@pytest.mark.parametrize("seed", range(2 * NUM_DRAWN))
def test_a_configuration_means_what_it_means_to_transformers(seed: int, tmp_path: Path) -> None:
    config = drawn_config(Random(seed))
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        theirs: Any = AutoConfig.from_pretrained(tmp_path)
        angles = LlamaRotaryEmbedding(theirs)(torch.empty(0), torch.arange(64)[None])
    except Exception:  # noqa: BLE001 (it is no configuration, then)
        theirs = None

    try:
        read = read_json_config(tmp_path)
        ours = native_spec(read)
        table = rope_table(ours.attentions[0].rope, ours.head_dim, 64)
    except StartupError as error:
        # transformers reads what it cannot build, and takes a theta that nobody means.
        words = ("is not a divisor", "write rope_theta into rope_scaling")
        assert theirs is None or any(w in error.message for w in words), error  # noqa: PT017
        return

    if theirs is None:
        return
    assert_same(ours, theirs)
    half = ours.head_dim // 2
    for part, expected in zip(table.chunk(2, dim=-1), angles, strict=True):
        assert torch.allclose(part, expected[0, :, :half], atol=1e-4)


def biases(weights: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {
        f"model.layers.{layer}.{name}.bias": torch.full(
            (len(weights[f"model.layers.{layer}.{name}.weight"]),), 0.3
        )
        for layer in range(2)
        for name in names
    }


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def changed(draw: Random, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with some more, fewer, or under other names."""
    change = draw.randrange(8)
    if change == 0:
        return weights | biases(weights, *QKV)
    if change == 1:
        return weights | biases(weights, "mlp.down_proj")
    if change == 2:
        return {k: w for k, w in weights.items() if not k.endswith(("_norm.weight", ".bias"))}
    if change == 3:
        return {k: w for k, w in weights.items() if not k.endswith(".bias")}
    if change == 4:
        norms = {
            f"model.layers.{layer}.self_attn.{name}_norm.weight": torch.full((16,), 1.5)
            for layer in range(2)
            for name in "qk"
        }
        return norms | weights
    if change == 5:
        return {name.removeprefix("model."): weight for name, weight in weights.items()}
    return weights


def logits_of(directory: Path, prompt: list[int]) -> Tensor:
    decoder = load_decoder(directory, dtype="float32", device=CPU, num_threads=1)
    block = BlockShape(decoder.num_layers, 8, decoder.num_kv_heads, decoder.head_dim, torch.float32)
    inputs = build_inputs(batch(share(prompt, range(5))), 8, CPU).forward
    with torch.inference_mode():
        return decoder.forward(inputs, KVCache.allocate(block, 5, CPU)).clone()


@pytest.mark.parametrize("seed", range(NUM_DRAWN // 4))
def test_a_checkpoint_gives_the_logits_of_transformers(seed: int, tmp_path: Path) -> None:
    draw = Random(seed)
    family = draw.choice(LLAMA_LIKE)
    options: dict[str, Any] = {"tie_word_embeddings": draw.random() < 0.5, "head_dim": 16}
    if family in ("llama", "qwen3"):
        options["attention_bias"] = draw.random() < 0.5
    if family == "llama":
        options["mlp_bias"] = draw.random() < 0.3
    write_tiny_model(tmp_path, family, **{**SIZES, "pad_token_id": 0}, **options)
    path = tmp_path / "model.safetensors"
    save_file(changed(draw, load_file(path)), path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("attention_bias", "mlp_bias", "rms_norm_eps"):
        if draw.random() < 0.2:
            config.pop(key, None)
    if draw.random() < 0.4:
        config["rope_scaling"] = dict(draw.choice(ROPES[1:]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = [draw.randrange(SIZES["vocab_size"]) for _ in range(30)]

    try:
        logits = logits_of(tmp_path, prompt)
    except StartupError as error:
        words = ("no tensor", "not part of the model", "shape", "rope")
        assert any(word in error.message for word in words), error.message  # noqa: PT017
        return

    models: Any = AutoModelForCausalLM
    model, report = models.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert relative_error(logits, reference_logits(model.eval(), prompt)[-1:]) < 1e-4

"""Every native family computes what transformers computes, without transformers."""

import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import StartupError
from tests.support.models.batches import batch, share
from tests.support.models.numerics import assert_close, poisoned
from tests.support.models.tiny import FAMILIES, VOCAB_SIZE, reference_logits, write_tiny_model
from worker.model import families
from worker.model.cache_layout import one_group
from worker.model.families import FAMILIES as FAMILIES_OF_FILES
from worker.model.forward import Decoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import KVCache
from worker.model.loading import load_decoder

MAX_RELATIVE_ERROR = 1e-5
CPU = torch.device("cpu")
BLOCK_SIZE = 8
BLOCKS = [[5, 1, 8, 3, 0, 7], [9, 4, 2, 6]]
PROMPTS = [
    [(7 * i) % VOCAB_SIZE for i in range(43)],
    [(11 * i + 5) % VOCAB_SIZE for i in range(26)],
]
STEPS = [(9, 0), (1, 26), (20, 0), (1, 0), (12, 0)]
"""The number of tokens of each prompt per step: chunks and single tokens, mixed."""


def load(directory: Path, kernels: str = "native") -> Decoder:
    return load_decoder(directory, dtype="float32", device=CPU, kernels=kernels, num_threads=2)


def stepwise_logits(decoder: Decoder, steps: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Each prompt's logits, [num_tokens, vocab_size], over a cache that initially contains NaN."""
    shape = (decoder.num_layers, 10, BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim)
    keys, values = (poisoned(*shape, dtype=decoder.dtype) for _ in range(2))
    cache = KVCache(keys, values, one_group(decoder.num_layers))
    computed: list[list[Tensor]] = [[] for _ in PROMPTS]
    for step in steps:
        shares = {}
        for row, count in enumerate(step):
            start = sum(len(part) for part in computed[row])
            if count:
                tokens = PROMPTS[row][start : start + count]
                shares[row] = share(tokens, BLOCKS[row], start=start)
        inputs = build_inputs(batch(*shares.values()), BLOCK_SIZE, CPU).forward
        every_token = replace(inputs, sampled_rows=torch.arange(len(inputs.token_ids)))
        with torch.inference_mode():
            logits = decoder.forward(every_token, cache).clone()
        order = sorted(shares, key=lambda row: shares[row].num_tokens > 1)
        parts = torch.split(logits, [shares[row].num_tokens for row in order])
        for row, part in zip(order, parts, strict=True):
            computed[row].append(part)
    return [torch.cat(parts) for parts in computed]


def assert_same_logits(directory: Path, model: Any) -> None:
    exact = copy.deepcopy(model).double()
    expected = [reference_logits(exact, prompt) for prompt in PROMPTS]
    for kernels in ("native", "reference"):
        for logits, right in zip(
            stepwise_logits(load(directory, kernels), STEPS), expected, strict=True
        ):
            assert_close(logits, right, MAX_RELATIVE_ERROR)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    assert_same_logits(tmp_path, write_tiny_model(tmp_path, family))


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "a head of its own": ("llama", {"tie_word_embeddings": False}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen without windows": ("qwen2", {"use_sliding_window": False}),
    "windows by layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_computes_the_logits_of_transformers(tmp_path: Path, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    assert_same_logits(tmp_path, write_tiny_model(tmp_path, family, **overrides))


def test_a_checkpoint_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same_logits(tmp_path, model)


FAULTS = {
    "a window that is one too long": ("mistral", 'window": 7', 'window": 8'),
    "another epsilon": ("mistral", "1e-06", "1e-02"),
    "another soft cap": ("gemma2", 'attn_logit_softcapping": 3.0', 'attn_logit_softcapping": 9.0'),
    "chunks that are one too long": ("llama4_text", 'chunk_size": 8', 'chunk_size": 9'),
    "experts in all groups": ("glm4_moe", 'topk_group": 2', 'topk_group": 4'),
    "another factor of residuals": ("granite", 'multiplier": 0.4', 'multiplier": 0.5'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_constant_is_caught(tmp_path: Path, fault: str) -> None:
    family, right, planted = FAULTS[fault]
    model = write_tiny_model(tmp_path, family)
    config = tmp_path / "config.json"
    assert right in config.read_text()
    config.write_text(config.read_text().replace(right, planted))
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_logits(tmp_path, model)


def test_sinks_are_not_forgotten(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "gpt_oss")
    with torch.no_grad():
        model.model.layers[1].self_attn.sinks.add_(3.0)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_logits(tmp_path, model)


def test_a_language_model_is_served_from_a_checkpoint_with_images(tmp_path: Path) -> None:
    text = write_tiny_model(tmp_path / "text", "gemma3_text")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": config})
    )
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(
        {**renamed, "vision_tower.patch.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors"
    )

    assert_same_logits(tmp_path, text)


def test_parts_that_predict_several_tokens_at_once_are_not_read(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "ernie4_5_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    further = {"model.mtp_block.0.input_layernorm.weight": torch.ones(96)}
    save_file({**tensors, **further}, tmp_path / "model.safetensors")

    assert_same_logits(tmp_path, model)


@pytest.mark.parametrize("family", FAMILIES_OF_FILES)
def test_every_family_has_a_test(family: str) -> None:
    of_checkpoints_with_images = {"gemma3", "llama4", "mistral3"}
    assert family in {*FAMILIES, *of_checkpoints_with_images}
    lines = (Path(families.__file__).parent / f"{family}.py").read_text().splitlines()
    assert len(lines) <= 120


def test_only_rows_to_be_sampled_have_logits(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    decoder = load(tmp_path)
    shares = batch(
        share(PROMPTS[0][:12], BLOCKS[0], is_sampled=False), share(PROMPTS[1], BLOCKS[1])
    )
    shape = (decoder.num_layers, 10, BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim)
    inputs = build_inputs(shares, BLOCK_SIZE, CPU).forward
    with torch.inference_mode():
        cache = KVCache(poisoned(*shape), poisoned(*shape), one_group(decoder.num_layers))
        logits = decoder.forward(inputs, cache)
    assert_close(logits, stepwise_logits(decoder, [(12, 26)])[1][-1:], MAX_RELATIVE_ERROR)


def test_native_families_load_and_run_without_transformers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    program = f"""
import sys
from pathlib import Path
from tests.support.models.batches import batch, share
from worker.model.loading import load_runner
from worker.model.start import RunnerLimits
runner = load_runner(Path({str(tmp_path)!r}), RunnerLimits(kv_cache_bytes=1 << 20), device="cpu")
assert len(runner.launch(batch(share([1, 2, 3], [0]))).result()) == 1
runner.close()
assert "transformers" not in sys.modules
"""
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=root)


def rewrite_config(directory: Path, old: str, new: str) -> None:
    path = directory / "config.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_a_tensor_without_a_place_in_the_model_refuses_it(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3")
    rewrite_config(tmp_path, '"num_hidden_layers": 3', '"num_hidden_layers": 2')
    with pytest.raises(
        StartupError, match=r"11 tensors are not part of .* model\.layers\.2\.input"
    ):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    rewrite_config(tmp_path, '"num_hidden_layers": 3', '"num_hidden_layers": 4')
    with pytest.raises(StartupError, match=r"no tensor model\.layers\.3\.input_layernorm\.weight"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_refused_with_both(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    rewrite_config(tmp_path, '"intermediate_size": 72', '"intermediate_size": 70')
    with pytest.raises(
        StartupError, match=r"gate_proj.* \(144, 96\), config.json says \(140, 96\)"
    ):
        load(tmp_path)

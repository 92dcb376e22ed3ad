"""A whole step of a decoder gives the same bits on every processor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.native import variants
from tests.support.models.numerics import assert_close
from tests.support.models.tiny import write_tiny_model
from tests.worker.model.decoders.test_native_families import CPU, STEPS, stepwise_logits
from worker.model.decoders import fused
from worker.model.loading import load_decoder


@pytest.mark.parametrize(
    ("dtype", "weight_format"),
    [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "q8_0"), ("bfloat16", "q4_1")],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_variant_computes_the_same_logits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: str,
    weight_format: str,
) -> None:
    odd_size, whole_blocks = 72, 96
    write_tiny_model(
        tmp_path,
        family,
        intermediate_size=odd_size if weight_format == "auto" else whole_blocks,
    )

    assert_same_bits(tmp_path, monkeypatch, dtype, weight_format)


@pytest.mark.parametrize(
    ("family", "dtype", "weight_format"),
    [
        ("mistral", "bfloat16", "q8_0"),
        ("qwen2", "float32", "auto"),
        ("qwen2_moe", "bfloat16", "auto"),
        ("qwen3_moe", "float32", "auto"),
        ("mixtral", "bfloat16", "q8_0"),
        ("gemma", "bfloat16", "auto"),
        ("gemma3_text", "bfloat16", "q8_0"),
        ("gemma4_unified_text", "bfloat16", "q8_0"),
        ("phi3", "float32", "auto"),
        ("olmo2", "bfloat16", "auto"),
        ("olmo3", "bfloat16", "q8_0"),
        ("olmoe", "float32", "auto"),
        ("granite", "bfloat16", "auto"),
        ("granitemoe", "bfloat16", "q8_0"),
        ("smollm3", "float32", "auto"),
        ("glm", "bfloat16", "auto"),
        ("glm4", "bfloat16", "q8_0"),
        ("exaone4", "float32", "auto"),
        ("ernie4_5", "bfloat16", "auto"),
        ("ernie4_5_moe", "float32", "auto"),
        ("seed_oss", "bfloat16", "q8_0"),
        ("arcee", "bfloat16", "auto"),
        ("ministral3", "bfloat16", "q8_0"),
        ("minimax_m2", "float32", "auto"),
        ("nemotron", "bfloat16", "auto"),
        ("hunyuan_v1_dense", "bfloat16", "q8_0"),
        ("mistral4", "bfloat16", "auto"),
        ("glm4_moe_lite", "float32", "auto"),
        ("gemma2", "float32", "auto"),
        ("gemma4_text", "float32", "auto"),
        ("gemma4_text", "bfloat16", "auto"),
        ("gpt_oss", "bfloat16", "auto"),
        ("gpt_oss", "bfloat16", "q8_0"),
        ("llama4_text", "bfloat16", "auto"),
        ("glm4_moe", "float32", "auto"),
        ("cohere2", "float32", "auto"),
        ("starcoder2", "bfloat16", "auto"),
        ("phimoe", "bfloat16", "auto"),
        ("apertus", "float32", "auto"),
        ("lfm2", "bfloat16", "q8_0"),
        ("lfm2_moe", "float32", "auto"),
        ("qwen3_next", "float32", "auto"),
        ("qwen3_5_text", "bfloat16", "q8_0"),
        ("qwen3_5_moe_text", "float32", "auto"),
        ("olmo_hybrid", "bfloat16", "q8_0"),
        ("kimi_linear", "float32", "auto"),
        ("granitemoehybrid", "bfloat16", "auto"),
        ("bamba", "bfloat16", "auto"),
        ("nemotron_h", "float32", "auto"),
        ("mamba2", "bfloat16", "q8_0"),
        ("falcon_mamba", "bfloat16", "q8_0"),
        ("jamba", "bfloat16", "auto"),
        ("falcon_h1", "bfloat16", "q8_0"),
        ("bloom", "bfloat16", "q8_0"),
        ("mpt", "float32", "auto"),
        ("deepseek_v2", "float32", "auto"),
        ("deepseek_v3", "bfloat16", "auto"),
    ],
)
def test_every_variant_computes_the_same_in_all_kinds_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, weight_format: str
) -> None:
    write_tiny_model(tmp_path, family, intermediate_size=96)

    assert_same_bits(tmp_path, monkeypatch, dtype, weight_format)


def test_every_variant_multiplies_latent_vectors_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_blocks: dict[str, Any] = {
        "qk_nope_head_dim": 32,
        "q_lora_rank": 64,
        "intermediate_size": 96,
    }
    # A rounded score may choose another expert, so that no layer has experts.
    write_tiny_model(tmp_path, "deepseek_v3", first_k_dense_replace=3, **whole_blocks)

    of_floats = assert_same_bits(tmp_path, monkeypatch, "bfloat16")
    of_blocks = assert_same_bits(tmp_path, monkeypatch, "bfloat16", "q8_0")

    assert_close(of_blocks, of_floats, 0.1)


@pytest.mark.parametrize("odd", [1e-40, 1e15, torch.inf], ids=["denormal", "great", "infinite"])
@pytest.mark.parametrize(
    "part",
    [
        *("embed_tokens", "input_layernorm", "q_norm", "k_norm", "v_proj"),
        *("gate_proj", "up_proj", "down_proj", "model.norm"),
    ],
)
def test_every_variant_computes_the_same_with_numbers_at_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, odd: float
) -> None:
    model = write_tiny_model(tmp_path, "qwen3")
    name, weights = next(one for one in model.named_parameters() if f"{part}." in one[0])
    with torch.no_grad():
        weights.view(-1)[3::41] = odd
    model.save_pretrained(tmp_path)

    logits = assert_same_bits(tmp_path, monkeypatch, "bfloat16")

    assert logits.isfinite().all() == (odd != torch.inf), name


def assert_same_bits(
    directory: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, weight_format: str = "auto"
) -> Tensor:
    """The logits, which all variants compute. A NaN has the same bits as any other, because no
    token depends on them."""
    computed = {}
    for name, variant in variants().items():
        monkeypatch.setattr(fused, "library", lambda variant=variant: variant)
        decoder = load_decoder(
            directory, dtype=dtype, weight_format=weight_format, device=CPU, num_threads=1
        )
        assert decoder.traits.has_own_threads
        computed[name] = torch.cat(stepwise_logits(decoder, STEPS))
    first = next(iter(computed.values()))
    is_same = {
        name: bool(((logits == first) | (logits.isnan() & first.isnan())).all())
        for name, logits in computed.items()
    }
    assert is_same == dict.fromkeys(computed, True)
    return first

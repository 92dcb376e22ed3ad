"""The benchmark of published shapes, in miniature."""

from dataclasses import replace

import pytest
import torch

from bench.shapes.random_model import RandomReader
from bench.shapes.steps import TimedDecoder
from bench.shapes.work import active_share, decode_bytes, prompt_multiplications
from worker.model.families import spec_of
from worker.model.spec import DeltaNet, ModelSpec

_SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
_TINY = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}


def tiny(family: str) -> ModelSpec:
    spec = spec_of({"model_type": family, **_SIZES, **_HEADS, **_TINY[family]})
    assert spec is not None
    return replace(spec, predictor=None)


@pytest.mark.parametrize("weights", ["bfloat16", "q8_0", "mxfp4"])
@pytest.mark.parametrize("family", list(_TINY))
def test_a_model_with_random_weights_is_measured(family: str, weights: str) -> None:
    decoder = TimedDecoder(tiny(family), RandomReader(tiny(family), weights), 1)

    step, prompt = decoder.decodes(2, 8, 3), decoder.prompts(16, 1)

    assert step.total_ms > 0
    assert prompt.total_ms > 0
    assert sum(prompt.parts.values()) == pytest.approx(prompt.total_ms)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    spec = tiny("qwen3_moe")
    reader = RandomReader(spec, "bfloat16")
    TimedDecoder(spec, reader, 1)
    expert_bytes = 2 * 4 * 4 * 3 * 64 * 32

    assert reader.experts.num_bytes == expert_bytes
    assert active_share(spec, 1) == 0.5
    assert active_share(spec, 2) == 0.75
    assert decode_bytes(spec, reader, 2, 8) - decode_bytes(spec, reader, 1, 8) == pytest.approx(
        expert_bytes / 4 + 4 * 2 * 2 * 8 * 32
    )


def test_a_step_reads_and_writes_states() -> None:
    spec = tiny("qwen3_5_text")
    reader = RandomReader(spec, "bfloat16")
    TimedDecoder(spec, reader, 1)
    states = sum(one.recurrence.state_size for one in spec.layers if one.recurrence)

    added = decode_bytes(spec, reader, 2, 8) - decode_bytes(spec, reader, 1, 8)

    assert added == 2 * 4 * states + 2 * 2 * 8 * 32


def test_a_prompt_is_multiplied_with_each_weight_once_for_each_token() -> None:
    spec = replace(tiny("qwen3_5_text"), layers=tiny("qwen3_5_text").layers[:1])
    reader = RandomReader(spec, "bfloat16")
    TimedDecoder(spec, reader, 1)
    rule = spec.layers[0].recurrence
    assert isinstance(rule, DeltaNet)

    found = prompt_multiplications(spec, reader, 3)

    assert found == 3 * (reader.others.num_weights + 4 * 2 * 32 * 32) + 64 * 64


def test_random_weights_are_finite() -> None:
    for weights in ("bfloat16", "q8_0", "mxfp4"):
        reader = RandomReader(tiny("gpt_oss"), weights)
        matrix = reader.linear(["mlp.experts.down_proj.0"], (96, 64)).weight.dense(torch.float32)
        assert matrix.isfinite().all()
        assert 0.005 < matrix.std() < 0.08

"""Rotary angles against transformers' angles, and the parameters in configurations."""

from typing import Any

import pytest
import torch

from shared.errors import StartupError
from tests.support.models.numerics import assert_close
from tests.support.models.tiny import native_spec
from worker.model.decoders.rope_table import rope_table
from worker.model.families import spec_of
from worker.model.spec import Rope

HEAD_DIM = 32
NUM_POSITIONS = 3000
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn with everything": {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
    },
    "yarn with its own amplitude": {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.25,
    },
}
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 3,
    "hidden_size": 8,
    "intermediate_size": 5,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_angles_are_those_of_transformers(scaling: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": scaling.split()[0], "rope_theta": 50_000.0, **SCALINGS[scaling]}
    config = LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        max_position_embeddings=4096,
        rope_parameters=dict(rope),
    )
    positions = torch.arange(NUM_POSITIONS)[None]
    expected = LlamaRotaryEmbedding(config)(torch.empty(0), positions)

    cosines, sines = rope_table(Rope(parameters=rope, dim=HEAD_DIM), HEAD_DIM, NUM_POSITIONS).chunk(
        2, dim=-1
    )

    # Angles reach 3,000 radians, which float32 resolves to 1e-4.
    assert_close(cosines, expected[0][0, :, : HEAD_DIM // 2], 5e-4)
    assert_close(sines, expected[1][0, :, : HEAD_DIM // 2], 5e-4)


def test_an_unknown_scaling_is_refused_by_name() -> None:
    rope = Rope(parameters={"rope_type": "dynamic", "rope_theta": 1e4}, dim=HEAD_DIM)
    with pytest.raises(StartupError, match="rope scaling 'dynamic' is not supported"):
        rope_table(rope, HEAD_DIM, 10)


def test_what_a_scaling_lacks_is_named() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4}
    with pytest.raises(StartupError, match="rope scaling 'linear' needs 'factor'"):
        rope_table(Rope(parameters=rope, dim=HEAD_DIM), HEAD_DIM, 10)


def test_both_spellings_of_a_scaling_are_read() -> None:
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}}
    old = {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}

    tables = [
        rope_table(spec.attentions[0].rope, spec.head_dim, 64)
        for spec in (native_spec(SIZES | new), native_spec(SIZES | old))
    ]

    assert torch.equal(*tables)
    with pytest.raises(StartupError, match=r"config\.json has no 'intermediate_size'"):
        spec_of({**new, "model_type": "llama", "num_attention_heads": 1, "hidden_size": 4})


@pytest.mark.parametrize(
    ("scaling", "max_seq_len"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}, 160),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, 64),
        ({"rope_type": "yarn", "factor": 4.0}, 64),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 64),
    ],
)
def test_yarn_extends_the_context_that_it_names(scaling: dict[str, Any], max_seq_len: int) -> None:
    assert native_spec(SIZES | {"rope_scaling": scaling}).max_seq_len == max_seq_len


def test_a_configuration_that_the_operations_do_not_know_is_not_native() -> None:
    assert spec_of(SIZES | {"hidden_act": "gelu"}) is not None
    assert spec_of(SIZES | {"hidden_act": "snake"}) is None
    assert spec_of(SIZES | {"rope_parameters": {"partial_rotary_factor": 0.5}}) is None
    assert spec_of(SIZES | {"model_type": "phi"}) is None

"""Models that run through transformers' own modules: the same logits, or a refusal by name."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from kernels.providers import Provider, load_ops
from shared.errors import StartupError
from worker.model.cache_layout import one_group
from worker.model.forward import ForwardInputs
from worker.model.kv_cache import KVCache
from worker.model.weights.sources import open_source

if TYPE_CHECKING:
    from worker.model.decoders.fallback import ForeignDecoder

MAX_RELATIVE_ERROR = 1e-5
BLOCK_SIZE = 8
VOCAB_SIZE = 97
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SAME_LOGITS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "phi": {},
    "gemma": {"head_dim": 16, "num_key_value_heads": 1},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "layer_types": None},
    "starcoder2": {"sliding_window": 7},
    "stablelm": {},  # does not pass its arguments on to attention
    "mixtral": {"num_local_experts": 4},
    "gpt2": {},
    "gemma2": {"head_dim": 8, "sliding_window": 6},  # with soft caps
    "vaultgemma": {"head_dim": 8, "sliding_window": 6},
    "gpt_oss": {  # with sinks
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
    "granite_swa": {"sliding_window": 6},
    "mimo_v2_flash": {
        "head_dim": 12,
        "v_head_dim": 8,
        "sliding_window": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "llama4_text": {  # with chunks
        "head_dim": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 6,
    },
    "deepseek_v2": {  # whose keys are longer than its values
        "num_key_value_heads": 4,
        "first_k_dense_replace": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({}, "of its 2 layers 0 call a registered attention"),
    "gptj": ({"rotary_dim": 4}, "attention cannot be replaced"),
    "falcon_h1": (
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
        "tokens of different requests would influence each other",
    ),
    "phi3": (
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
        },
        "tokens of different requests would influence each other",
    ),
}


class Chunk(NamedTuple):
    """Tokens ``start`` .. ``end - 1`` of sequence ``sequence``."""

    sequence: int
    start: int
    end: int


SEQUENCE_LENS = (21, 10, 5)
BLOCK_TABLES = ((5, 0, 3), (1, 6, 0), (2, 0, 0))
STEPS = (
    (Chunk(0, 0, 13), Chunk(1, 0, 8)),
    (Chunk(1, 8, 9), Chunk(0, 13, 20), Chunk(2, 0, 4)),
    (Chunk(1, 9, 10), Chunk(0, 20, 21), Chunk(2, 4, 5)),
)
"""Chunked prefills, then decodes beside prefills, then decodes alone."""


def tiny_model(model_type: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES | sizes)
    config.num_hidden_layers = SIZES["num_hidden_layers"]
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough weights for attention to matter: at the usual 0.02 all tokens look alike.
            parameter.normal_(std=0.3)
    return model.eval()


def load(directory: Path, provider: Provider = "reference") -> "ForeignDecoder":
    cpu = torch.device("cpu")
    from worker.model.decoders import fallback  # not in every process that collects the tests

    return fallback.load(
        open_source(directory),
        dtype=torch.float32,
        device=cpu,
        ops=lambda shape: load_ops(provider),
    )


def rehearse(directory: Path, *, reads_weights: bool) -> None:
    from worker.model.decoders import fallback

    fallback.rehearse(open_source(directory), reads_weights=reads_weights)


def save_and_load(model: Any, directory: Path) -> "ForeignDecoder":
    model.save_pretrained(directory)
    return load(directory)


def pack(chunks: Sequence[Chunk], sequences: Sequence[Tensor]) -> ForwardInputs:
    positions = [torch.arange(chunk.start, chunk.end) for chunk in chunks]
    tables = torch.tensor([BLOCK_TABLES[chunk.sequence] for chunk in chunks])
    slots = [
        table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        for table, at in zip(tables, positions, strict=True)
    ]
    lens = torch.tensor([0] + [chunk.end - chunk.start for chunk in chunks])
    num_tokens = int(lens.sum())
    return ForwardInputs(
        token_ids=torch.cat([sequences[c.sequence][c.start : c.end] for c in chunks]),
        positions=torch.cat(positions),
        slots=torch.cat(slots)[None],
        query_starts=lens.cumsum(0).int(),
        context_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32),
        block_tables=tables.int()[None],
        sampled_rows=torch.arange(num_tokens),
        num_decodes=sum(chunk.end - chunk.start == 1 for chunk in chunks),
        max_query_len=int(lens.max()),
    )


def paged_logits(decoder: "ForeignDecoder", sequences: Sequence[Tensor]) -> list[Tensor]:
    """Logits of every token of every sequence, computed in `STEPS`."""
    shape = (decoder.num_layers, 7, BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim)
    kv_cache = KVCache(
        torch.full(shape, torch.nan), torch.full(shape, torch.nan), one_group(shape[0])
    )
    logits = [torch.full((len(ids), decoder.vocab_size), torch.nan) for ids in sequences]
    for chunks in STEPS:
        with torch.inference_mode():
            rows = decoder.forward(pack(chunks, sequences), kv_cache)
        for chunk in chunks:
            length = chunk.end - chunk.start
            logits[chunk.sequence][chunk.start : chunk.end], rows = rows[:length], rows[length:]
    return logits


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("model_type", SAME_LOGITS)
def test_mixed_steps_over_the_paged_cache_give_the_logits_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    model = tiny_model(model_type, **SAME_LOGITS[model_type])
    sequences = [torch.randint(1, VOCAB_SIZE, (length,)) for length in SEQUENCE_LENS]

    logits = paged_logits(save_and_load(model, tmp_path), sequences)

    with torch.inference_mode():
        expected = [model(ids[None], use_cache=False).logits[0] for ids in sequences]
    errors = [relative_error(a, b) for a, b in zip(logits, expected, strict=True)]
    assert max(errors) < MAX_RELATIVE_ERROR


def test_the_native_attention_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    model = tiny_model("gemma3_text", head_dim=16, sliding_window=6, layer_types=None)
    model.save_pretrained(tmp_path)
    sequences = [torch.randint(1, VOCAB_SIZE, (length,)) for length in SEQUENCE_LENS]

    logits = paged_logits(load(tmp_path, "native"), sequences)

    with torch.inference_mode():
        expected = [model(ids[None], use_cache=False).logits[0] for ids in sequences]
    errors = [relative_error(a, b) for a, b in zip(logits, expected, strict=True)]
    assert max(errors) < MAX_RELATIVE_ERROR


def test_a_planted_fault_exceeds_the_error_bound(tmp_path: Path) -> None:
    model = tiny_model("gpt_neox")
    decoder = save_and_load(model, tmp_path)
    sequences = [torch.randint(1, VOCAB_SIZE, (length,)) for length in SEQUENCE_LENS]
    wrong = [ids.clone() for ids in sequences]
    wrong[0][0] = (wrong[0][0] + 1) % VOCAB_SIZE

    logits = paged_logits(decoder, wrong)

    with torch.inference_mode():
        expected = model(sequences[0][None], use_cache=False).logits[0]
    assert relative_error(logits[0][-1], expected[-1]) > 100 * MAX_RELATIVE_ERROR


def test_only_sampled_rows_get_logits(tmp_path: Path) -> None:
    decoder = save_and_load(tiny_model("phi"), tmp_path)
    shape = (decoder.num_layers, 7, BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim)
    kv_cache = KVCache(torch.zeros(shape), torch.zeros(shape), one_group(shape[0]))
    inputs = pack(STEPS[0], [torch.arange(1, length + 1) for length in SEQUENCE_LENS])
    few: Any = {name: getattr(inputs, name) for name in ForwardInputs.__slots__}

    with torch.inference_mode():
        every = decoder.forward(inputs, kv_cache)
        some = decoder.forward(
            ForwardInputs(**few | {"sampled_rows": torch.tensor([20, 12])}), kv_cache
        )

    torch.testing.assert_close(some, every[[20, 12]])


def test_a_decoder_says_what_the_cache_and_the_scheduler_need(tmp_path: Path) -> None:
    decoder = save_and_load(tiny_model("gemma", head_dim=16, num_key_value_heads=1), tmp_path)

    shape = (decoder.num_layers, decoder.num_kv_heads, decoder.head_dim, decoder.vocab_size)
    assert shape == (2, 1, 16, VOCAB_SIZE)
    assert decoder.max_seq_len == SIZES["max_position_embeddings"]
    assert (decoder.dtype, decoder.device.type) == (torch.float32, "cpu")


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_our_attention_cannot_do_refuses_the_model_by_name(
    model_type: str, tmp_path: Path
) -> None:
    sizes, reason = REFUSED[model_type]
    tiny_model(model_type, **sizes).save_pretrained(tmp_path)

    with pytest.raises(StartupError, match=f"model type {model_type} .*{reason}"):
        load(tmp_path)


def refusal_of(work: Callable[[], object]) -> str:
    """The message with which a model is refused; empty if it is not."""
    try:
        work()
    except StartupError as error:
        return error.message
    return ""


@pytest.mark.parametrize("model_type", ["gpt_neox", *REFUSED])
def test_a_rehearsal_says_what_loading_says(model_type: str, tmp_path: Path) -> None:
    sizes, _ = REFUSED.get(model_type, ({}, ""))
    tiny_model(model_type, **sizes).save_pretrained(tmp_path)

    said = refusal_of(lambda: rehearse(tmp_path, reads_weights=True))

    assert said == refusal_of(lambda: load(tmp_path))


@pytest.mark.parametrize("reads_weights", [True, False])
def test_a_rehearsal_finds_missing_weights(reads_weights: bool, tmp_path: Path) -> None:
    model = tiny_model("gpt_neox")
    state = model.state_dict()
    del state["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    model.save_pretrained(tmp_path, state_dict=state)

    with pytest.raises(StartupError, match=r"lacks 1 weights: gpt_neox\.layers\.1"):
        rehearse(tmp_path, reads_weights=reads_weights)


def test_a_type_without_a_causal_language_model_is_refused_in_short(tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("mistral3").save_pretrained(tmp_path)
    save_file({"norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")

    with pytest.raises(StartupError) as refusal:
        load(tmp_path)

    assert refusal.value.message == (
        "model type mistral3 cannot be served: transformers has no causal language model of this "
        "type"
    )


def test_missing_weights_are_refused_and_never_drawn_at_random(tmp_path: Path) -> None:
    model = tiny_model("gpt_neox")
    state = model.state_dict()
    del state["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    model.save_pretrained(tmp_path, state_dict=state)

    with pytest.raises(StartupError, match=r"lacks 1 weights: gpt_neox\.layers\.1"):
        load(tmp_path)


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    model = tiny_model("gpt_neox")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(StartupError, match=r"no model\.safetensors"):
        load(tmp_path)


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    tiny_model("gpt_neox").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text()
        .replace('"gpt_neox"', '"homemade"')
        .replace("{", '{"auto_map": {"AutoConfig": "homemade.Config"},', 1)
    )
    (tmp_path / "homemade.py").write_text("raise SystemExit('ran')")

    with pytest.raises(StartupError, match="transformers does not support"):
        load(tmp_path)

"""Layers that do not read all tokens free the blocks behind them; every token stays the same."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kernels.providers import load_ops
from shared.errors import StartupError
from shared.messages import SamplingParams
from tests.support.models.engine import by_sequence
from tests.support.models.tiny import (
    VOCAB_SIZE,
    native_spec,
    reference_logits,
    write_tiny_model,
)
from worker.engine.cache.layout import (
    ChunkCache,
    FullCache,
    LatentCache,
    StateCache,
    WindowCache,
)
from worker.engine.engine import Engine
from worker.engine.interface import EngineLoad, Output, SequenceId, StepOutput, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.cache_layout import KeptTokens, layout_of, layout_of_spec
from worker.model.decoders import fallback
from worker.model.forward import Decoder
from worker.model.kv_cache import BlockShape
from worker.model.loading import load_decoder
from worker.model.runner import TorchRunner
from worker.model.spec import Attention, Layer, Mlp, ModelSpec, Norm, ShortConv
from worker.model.start import RunnerLimits, start_runner
from worker.model.weights.sources import open_source

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPTS = [[(7 * k * k + 3 * i + 1) % VOCAB_SIZE for k in range(12 + 8 * i)] for i in range(3)]
MAX_TOKENS = 48
BLOCK_SIZE = 4
STEP_TOKENS = 16
LIMITS = RunnerLimits(block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=STEP_TOKENS)
MODELS = {
    "one window in all layers, native": ("mistral", "native"),
    "windows in one layer of two, native": ("gpt_oss", "native"),
    "windows in two layers of three, native": ("gemma3_text", "native"),
    "chunks, native": ("llama4_text", "native"),
    "chunks": ("llama4_text", "reference"),
    "layers with shorter keys, native": ("gemma4_text", "native"),
    "layers with shorter keys": ("gemma4_text", "reference"),
    "windows, transformers": ("exaone4", "transformers"),
    "experts of a sparse mixer, native": ("phimoe", "native"),
    "an activation with learnt constants, native": ("apertus", "native"),
    "latent vectors, native": ("deepseek_v3", "native"),
    "latent vectors": ("glm4_moe_lite", "reference"),
}
OVERRIDES: dict[str, dict[str, Any]] = {
    # 64 elements, beside the 32 of layers with a window.
    "gemma4_text": {"global_head_dim": 64},
    # With its window, no sequence would grow.
    "phimoe": {"sliding_window": None},
}


class Served(NamedTuple):
    token_ids: list[list[int]]
    load: EngineLoad
    """At the end."""
    most_blocks: int
    """The maximum number of blocks in use."""


def load(directory: Path, kernels: str) -> Decoder:
    if kernels == "transformers":
        return fallback.load(
            open_source(directory),
            dtype=torch.float32,
            device=CPU,
            ops=lambda shape: load_ops(),
        )
    return load_decoder(directory, dtype="float32", device=CPU, kernels=kernels)


def block_of(decoder: Decoder) -> BlockShape:
    layout = decoder.cache_layout(BLOCK_SIZE)
    return BlockShape(
        layout.num_places,
        BLOCK_SIZE,
        decoder.num_kv_heads,
        decoder.head_dim,
        decoder.dtype,
        layout.has_values,
    )


def start(decoder: Decoder, num_blocks: int) -> TorchRunner:
    """A runner with a cache of so many blocks."""
    block = block_of(decoder)
    limits = replace(LIMITS, kv_cache_bytes=num_blocks * block.num_bytes)
    return start_runner(decoder, load_ops(), limits, has_graphs=False)


def few_blocks(decoder: Decoder) -> int:
    """The number of blocks in which the longest prompt has room alone, with its answer."""
    num_tokens = len(PROMPTS[-1]) + MAX_TOKENS
    return LIMITS.divide(1, decoder.cache_layout(BLOCK_SIZE)).num_blocks_for(num_tokens)


def tokens(outputs: Iterable[Output]) -> list[StepOutput]:
    return [output for output in outputs if isinstance(output, StepOutput)]


def serve(
    runner: TorchRunner,
    prompts: list[list[int]],
    *,
    max_tokens: int = MAX_TOKENS,
    num_turns: int = 1,
) -> Served:
    """A chat with each prompt, all at a time."""
    engine = Engine(runner, SchedulerLimits(4, STEP_TOKENS, prefix_cache=True))
    outputs: list[StepOutput] = []
    most = 0
    for turn in range(num_turns):
        for k, prompt in enumerate(prompts):
            known = [output.token_id for output in outputs if output.sequence_id == (f"0/{k}", 0)]
            name = SequenceId(f"{turn}/{k}", 0)
            outputs += tokens(engine.step([Submit(name, [*prompt, *known], GREEDY, 0, max_tokens)]))
        while engine.has_work:
            outputs += tokens(engine.step())
            engine.check_invariants()
            most = max(most, engine.load().num_blocks - engine.load().num_free_blocks)
    engine.close()
    token_ids = [[o.token_id for o in stream] for _, stream in sorted(by_sequence(outputs).items())]
    return Served(token_ids, engine.load(), most)


def assert_greedy(model: Any, served: Served) -> None:
    """Every token is the token that transformers finds most likely, or as likely as that but for
    rounding, which differs from processor to processor."""
    num_prompts = len(PROMPTS)
    for k, prompt in enumerate(PROMPTS):
        answer = [*served.token_ids[k], *served.token_ids[k + num_prompts]]
        logits = reference_logits(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(chosen, logits.amax(dim=-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_layers_free_the_blocks_behind_them_and_change_no_token(tmp_path: Path, name: str) -> None:
    model_type, kernels = MODELS[name]
    model = write_tiny_model(tmp_path, model_type, **OVERRIDES.get(model_type, {}))
    decoder = load(tmp_path, kernels)

    served = serve(start(decoder, 400), PROMPTS, num_turns=2)
    pressed = serve(start(decoder, few_blocks(decoder)), PROMPTS)

    assert_greedy(model, served)
    assert served.load.num_cached_tokens > 0
    assert pressed.token_ids == served.token_ids[: len(PROMPTS)]
    # With windows in all layers no sequence grows, so that none is preempted.
    grows = any(isinstance(group, FullCache) for group in decoder.cache_layout(BLOCK_SIZE).groups)
    assert (pressed.load.num_preemptions > 0) == grows


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_sequence_behind_a_window_never_holds_more_than_a_window_and_a_step(
    tmp_path: Path, kernels: str
) -> None:
    write_tiny_model(tmp_path, "mistral", sliding_window=7)
    runner = start(load(tmp_path, kernels), 7)

    served = serve(runner, PROMPTS[:1], max_tokens=90, num_turns=2)

    assert runner.max_seq_len == 256
    assert runner.facts()["kv_cache_sequences"] == 1
    assert [len(token_ids) for token_ids in served.token_ids] == [90, 90]
    # 6 tokens of the window before it and the 16 of a step lie in up to 7 blocks of 4.
    assert served.most_blocks <= 7
    assert served.load.num_preemptions == 0


def layers(*windows: int | None) -> list[KeptTokens]:
    return [KeptTokens(window) for window in windows]


def test_layers_are_divided_so_that_few_places_stay_empty() -> None:
    gemma = layout_of(layers(*[None if k % 6 == 5 else 512 for k in range(26)]), 32768)
    gpt_oss = layout_of(layers(*[128, None] * 12), 131072)
    mistral = layout_of(layers(*[4096] * 32), 32768)

    assert (len(gemma.groups), gemma.num_places) == (7, 4)
    assert gemma.groups.count(FullCache()) == 1
    assert (gpt_oss.groups, gpt_oss.num_places) == ([WindowCache(128), FullCache()], 12)
    assert (mistral.groups, mistral.num_places) == ([WindowCache(4096)], 32)
    for layout in (gemma, gpt_oss, mistral):
        assert len(set(layout.places)) == len(layout.places)


def test_a_window_as_long_as_the_context_keeps_all_tokens() -> None:
    assert layout_of(layers(4096, None), max_seq_len=4096).groups == [FullCache()]


def test_attention_in_tiles_reads_no_block_that_was_freed() -> None:
    layout = layout_of(layers(512, None), 32768, "triton")
    window, block = layout.groups[0], 16
    assert isinstance(window, WindowCache)

    for position in range(2000):
        first_tile = max(0, position + 1 - 512) // 128 * 128
        assert window.first_read(position) // block * block <= first_tile


def test_a_chunk_keeps_its_own_tokens_alone() -> None:
    llama4 = layout_of([KeptTokens(None, 8192)] * 3 + [KeptTokens(None)], 1 << 20)
    assert llama4.groups == [*[ChunkCache(8192)] * 3, FullCache()]


def test_blocks_of_shorter_keys_are_counted_in_their_own_size() -> None:
    gemma4 = layout_of([KeptTokens(512, key_size=4096), KeptTokens(None, key_size=2048)], 32768)
    odd = layout_of([KeptTokens(512, key_size=4096), KeptTokens(None, key_size=3000)], 32768)

    assert (gemma4.groups, gemma4.key_blocks) == ([WindowCache(512), FullCache()], [1, 2])
    assert (odd.groups, odd.key_blocks) == ((FullCache(),), [1])


def test_states_take_blocks_of_the_pool_and_snapshots_no_more_than_tokens_do() -> None:
    """The sizes of LFM2 1.2B."""
    attention = Attention(num_heads=32, num_kv_heads=8, head_dim=64, scale=1.0, rope=None)
    part, conv = Mlp(size=8192), ShortConv(size=2048, num_taps=3)
    norm = Norm(eps=1e-5)
    layers = [
        Layer(
            attention=attention if k in (2, 5, 8, 10, 12, 14) else None,
            recurrence=None if k in (2, 5, 8, 10, 12, 14) else conv,
            feed_forward=part,
            before_attention=norm,
            before_feed_forward=norm,
        )
        for k in range(16)
    ]
    spec = ModelSpec(
        vocab_size=65536,
        hidden_size=2048,
        max_seq_len=32768,
        layers=tuple(layers),
        final_norm=norm,
        has_tied_embeddings=True,
    )

    layout = layout_of_spec(spec, 32768, "native", block_size=16, dtype=torch.bfloat16)

    assert layout.groups == [FullCache(), StateCache(num_blocks=1, every=128)]
    assert layout.num_places == 6
    assert [first for first in layout.states if first is not None] == list(range(10))


def test_a_block_of_a_model_without_attention_is_a_state() -> None:
    config = {"model_type": "mamba2", "hidden_size": 2560, "num_heads": 80, "n_groups": 1}
    spec = native_spec(config)

    layout = layout_of_spec(spec, 32768, "native", block_size=16, dtype=torch.bfloat16)

    (state,) = layout.groups
    assert state == StateCache(num_blocks=1, every=1024)
    assert layout.places == [None] * 64
    block = BlockShape(layout.num_places, 16, spec.num_kv_heads, spec.head_dim, torch.bfloat16)
    floats = sum(one.recurrence.state_size for one in spec.layers if one.recurrence)
    assert 1 <= block.num_bytes / (4 * floats) < 1.01


def test_of_latent_attention_one_vector_is_kept_for_all_heads(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "deepseek_v3")
    decoder = load(tmp_path, "native")

    runner = start(decoder, 7)

    latent_and_rotary, float_bytes = 32 + 16, 4
    token_bytes = decoder.num_layers * latent_and_rotary * float_bytes
    assert decoder.cache_layout(BLOCK_SIZE).groups == [LatentCache()]
    assert runner.facts()["kv_cache_bytes"] == 7 * BLOCK_SIZE * token_bytes


def test_a_cache_without_a_block_for_each_group_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "gpt_oss")
    with pytest.raises(StartupError, match=r"for its first 4 tokens, but has"):
        start(load(tmp_path, "reference"), num_blocks=1)

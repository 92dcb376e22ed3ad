"""A model whose layers keep states is resumed exactly: wherever a prompt is cut, from a snapshot,
after a preemption, and on another worker."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from kernels.providers import load_ops
from shared.messages import SamplingParams
from tests.support.models.batches import batch, share
from tests.support.models.engine import by_sequence
from tests.support.models.numerics import poisoned
from tests.support.models.tiny import VOCAB_SIZE, reference_logits, write_tiny_model
from tests.worker.model.decoders.test_native_families import keeps_tokens, state_blocks
from worker.engine.engine import Engine
from worker.engine.interface import EngineLoad, SequenceId, StepOutput, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.engine.sequence_cache import HEADROOM_BLOCKS
from worker.model.forward import Decoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import KVCache
from worker.model.loading import load_decoder, load_runner
from worker.model.runner import TorchRunner
from worker.model.start import RunnerLimits, start_runner

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
BLOCK_SIZE = 8
STEP_TOKENS = 64
MAX_TOKENS = 48
LIMITS = RunnerLimits(block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=STEP_TOKENS)
_SMALL_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SMALL_STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": _SMALL_DELTA,
    "qwen3_5_text": _SMALL_DELTA,
    "qwen3_5_moe_text": _SMALL_DELTA,
    "granitemoehybrid": {"mamba_expand": 1, "mamba_d_head": 16}
    | {"mamba_d_state": 4, "mamba_n_groups": 1, "mamba_d_conv": 2},
    "jamba": {"mamba_expand": 1, "mamba_d_state": 4},
    "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 16},
    "olmo_hybrid": _SMALL_DELTA | {"linear_num_key_heads": 2},
}
"""Sizes with which several sequences have room in few blocks, and are preempted as they grow."""
PROMPTS = [[(5 * k * k + 3 * i + 1) % VOCAB_SIZE for k in range(130 + 7 * i)] for i in range(3)]
"""Longer than the 128 tokens after which there is a snapshot."""
RECURRENT = [
    *("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
    *("kimi_linear", "mamba2", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1"),
    *("mamba", "falcon_mamba", "jamba"),
]
LONG: dict[str, Any] = {"max_position_embeddings": 2048}


def load(directory: Path, kernels: str = "native") -> Decoder:
    return load_decoder(directory, dtype="float32", device=CPU, kernels=kernels, num_threads=1)


def start(decoder: Decoder, num_blocks: int) -> TorchRunner:
    """A runner with a cache of so many blocks."""
    num_places = decoder.cache_layout(BLOCK_SIZE).num_places
    key_bytes = decoder.num_kv_heads * decoder.head_dim * decoder.dtype.itemsize
    limits = replace(LIMITS, kv_cache_bytes=num_blocks * 2 * num_places * BLOCK_SIZE * key_bytes)
    return start_runner(decoder, load_ops(), limits, has_graphs=False)


def few_blocks(decoder: Decoder) -> int:
    """The number of blocks in which two prompts have room, but not with their answers."""
    cache = LIMITS.divide(1, decoder.cache_layout(BLOCK_SIZE))
    return HEADROOM_BLOCKS + sum(cache.num_blocks_for(len(prompt)) for prompt in PROMPTS[:2])


def answers(
    runner: TorchRunner, prompts: Sequence[Sequence[int]], known: Sequence[Sequence[int]] = ()
) -> tuple[list[list[int]], EngineLoad, list[int]]:
    """The answers to all prompts at a time, the load at the end, and the cached tokens of each.
    ``known`` are the first tokens of the answers, which another worker has drawn."""
    streams, load = run(runner, prompts, GREEDY, known)
    cached = [stream[0].num_cached_tokens for stream in streams]
    return [[output.token_id for output in stream] for stream in streams], load, cached


def run(
    runner: TorchRunner,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    known: Sequence[Sequence[int]] = (),
    first: int = 0,
) -> tuple[list[list[StepOutput]], EngineLoad]:
    """The outputs of each prompt, all of which are in the engine at a time, and the load at the
    end. Sequences have numbers from ``first``."""
    engine = Engine(runner, SchedulerLimits(4, STEP_TOKENS, prefix_cache=True))
    submits = [
        Submit(SequenceId(str(k), 0), prompt, params, 0, MAX_TOKENS, frozenset(), output_ids)
        for k, (prompt, output_ids) in enumerate(
            zip(prompts, known or [()] * len(prompts), strict=True), start=first
        )
    ]
    outputs = list(engine.step(submits))
    while engine.has_work:
        outputs += engine.step()
        engine.check_invariants()
    load = engine.load()
    engine.close()
    return [stream for _, stream in sorted(by_sequence(outputs).items())], load


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *product(
            ["lfm2", "lfm2_moe", "qwen3_5_text", "falcon_h1", "jamba"], ["native", "reference"]
        ),
        ("kimi_linear", "native"),
        ("olmo_hybrid", "native"),
        ("granitemoehybrid", "native"),
        ("qwen3_next", "native"),
        ("qwen3_5_moe_text", "native"),
    ],
)
def test_snapshots_and_preemptions_change_no_token(
    tmp_path: Path, family: str, kernels: str
) -> None:
    model = write_tiny_model(tmp_path, family, **SMALL_STATES.get(family, {}))
    decoder = load(tmp_path, kernels)

    first, _, _ = answers(start(decoder, 300), PROMPTS)
    pressed, load_at_end, _ = answers(start(decoder, few_blocks(decoder)), PROMPTS)

    for prompt, answer in zip(PROMPTS, first, strict=True):
        logits = reference_logits(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        assert logits.argmax(dim=-1).tolist() == answer
    assert load_at_end.num_preemptions > 0
    assert pressed == first


def snapshot_prompt(decoder: Decoder) -> tuple[list[int], int]:
    """A prompt that is a little longer than the number of tokens after which there is a snapshot,
    and that number."""
    group = decoder.cache_layout(BLOCK_SIZE).state
    assert group is not None
    return [(5 * k * k + 1) % VOCAB_SIZE for k in range(group.every + 2)], group.every


@pytest.mark.parametrize(
    "family", ["lfm2", "qwen3_5_text", "nemotron_h", "mamba2", "kimi_linear", "olmo_hybrid"]
)
def test_the_next_turn_starts_at_the_last_snapshot(tmp_path: Path, family: str) -> None:
    write_tiny_model(tmp_path, family, **LONG)
    decoder = load(tmp_path)
    prompt, num_cached = snapshot_prompt(decoder)
    limits = SchedulerLimits(4, STEP_TOKENS, prefix_cache=True)
    first, _, _ = answers(start(decoder, 300), [prompt])
    turn = [*prompt, *first[0], 7, 8, 9]
    alone, _, cached_alone = answers(start(decoder, 300), [turn])

    engine = Engine(start(decoder, 300), limits)
    outputs: list[StepOutput] = []
    for name, prompt_ids in (("first", prompt), ("second", turn)):
        submit = Submit(SequenceId(name, 0), prompt_ids, GREEDY, 0, MAX_TOKENS, frozenset())
        outputs = [o for o in engine.step([submit]) if isinstance(o, StepOutput)]
        while engine.has_work:
            outputs += [o for o in engine.step() if isinstance(o, StepOutput)]
    engine.close()

    assert [output.token_id for output in outputs] == alone[0]
    assert (cached_alone, outputs[0].num_cached_tokens) == ([0], num_cached)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_batch_without_keys_and_values_makes_way_and_continues_from_its_snapshot(
    tmp_path: Path, kernels: str
) -> None:
    model = write_tiny_model(tmp_path, "mamba2", **LONG)
    decoder = load(tmp_path, kernels)
    prompt, _ = snapshot_prompt(decoder)
    runner = start(decoder, 2)
    assert runner.num_blocks == 2
    submits = [
        Submit(SequenceId("batch", 0), prompt, GREEDY, 0, 8, job_class="batch"),
        Submit(SequenceId("urgent", 0), PROMPTS[0], GREEDY, 0, 8),
    ]

    engine = Engine(runner, SchedulerLimits(4, STEP_TOKENS, prefix_cache=True))
    outputs = list(engine.step(submits[:1]))
    while len(outputs) < 3:
        outputs += engine.step()
    outputs += engine.step(submits[1:])
    steps_left = 0
    while engine.has_work:
        outputs += engine.step()
        engine.check_invariants()
        steps_left += 1
    load_at_end = engine.load()
    engine.close()

    assert load_at_end.num_preemptions == 1
    # From the start, the steps of the longer prompt alone would be as many.
    assert steps_left < len(prompt) // STEP_TOKENS + len(PROMPTS[0]) // STEP_TOKENS + 16
    for submit in submits:
        answer = [o.token_id for o in by_sequence(outputs)[submit.sequence_id]]
        logits = reference_logits(model, [*submit.prompt_ids, *answer[:-1]])
        assert logits[len(submit.prompt_ids) - 1 :].argmax(dim=-1).tolist() == answer


@pytest.mark.parametrize("family", ["lfm2", "kimi_linear", "olmo_hybrid"])
def test_a_stream_that_moves_to_another_worker_continues_with_the_same_tokens(
    tmp_path: Path, family: str
) -> None:
    write_tiny_model(tmp_path, family)
    here, there = load(tmp_path), load(tmp_path)
    whole, _, _ = answers(start(here, 300), PROMPTS[:1])

    for num_known in (1, *range(3, 12), MAX_TOKENS - 1):  # 134 and 142 tokens fill whole blocks
        known = whole[0][:num_known]
        rest, _, _ = answers(start(there, 300), PROMPTS[:1], [known])
        assert [*known, *rest[0]] == whole[0]


def chunked_logits(decoder: Decoder, prompt: list[int], size: int) -> Tensor:
    """The logits of the last token, where a step computes so many tokens of the prompt."""
    layout = decoder.cache_layout(BLOCK_SIZE)
    assert layout.state is not None
    first = 10 + 2 * layout.state.num_blocks
    blocks = list(range(first, first + -(-len(prompt) // BLOCK_SIZE)))
    num_blocks = first + len(blocks)
    if not keeps_tokens(layout):
        blocks = []
    shape = (layout.num_places, num_blocks, BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim)
    cache = KVCache(poisoned(*shape), poisoned(*shape), layout)
    logits = torch.empty(0)
    for step, at in enumerate(range(0, len(prompt), size)):
        tokens = prompt[at : at + size]
        num_used = -(-(at + len(tokens)) // BLOCK_SIZE)
        states = state_blocks(layout, 0, step)
        shares = batch(share(tokens, blocks[:num_used], start=at, states=states))
        with torch.inference_mode():
            inputs = build_inputs(shares, BLOCK_SIZE, CPU, layout).forward
            logits = decoder.forward(inputs, cache).clone()
    return logits


@pytest.mark.parametrize("family", RECURRENT)
def test_a_prompt_in_chunks_of_any_length_gives_the_same_bits(tmp_path: Path, family: str) -> None:
    write_tiny_model(tmp_path, family)
    decoder = load(tmp_path)
    prompt = PROMPTS[0]
    whole = chunked_logits(decoder, prompt, len(prompt))

    for size in range(1, len(prompt)):
        assert torch.equal(chunked_logits(decoder, prompt, size), whole), size


@pytest.mark.parametrize("family", RECURRENT)
def test_a_sequence_has_the_same_scores_in_a_batch_as_alone(tmp_path: Path, family: str) -> None:
    write_tiny_model(tmp_path, family)
    decoder = load(tmp_path)
    scored = msgspec.structs.replace(GREEDY, logprobs=3)

    together, _ = run(start(decoder, 300), PROMPTS, scored)

    assert together == [
        stream
        for k, prompt in enumerate(PROMPTS)
        for stream in run(start(decoder, 300), [prompt], scored, first=k)[0]
    ]


def test_a_worker_counts_states_among_what_a_sequence_takes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "lfm2")
    limits = replace(LIMITS, max_seq_len=200, kv_cache_bytes=1 << 20)

    runner = load_runner(tmp_path, limits, device="cpu", compute_threads=1)

    layout = runner.decoder.cache_layout(BLOCK_SIZE)
    assert layout.state is not None
    # A state that a step reads, and one that it writes.
    per_sequence = 200 // BLOCK_SIZE + 2 * layout.state.num_blocks
    facts = runner.facts()
    assert facts["kv_cache_sequences"] == runner.num_blocks // per_sequence
    block_bytes = layout.num_places * 2 * BLOCK_SIZE * runner.decoder.head_dim
    block_bytes *= runner.decoder.num_kv_heads * runner.decoder.cache_dtype.itemsize
    assert facts["sequence_state_bytes"] == 2 * layout.state.num_blocks * block_bytes
    runner.close()

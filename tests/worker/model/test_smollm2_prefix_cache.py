"""SmolLM2 generates the same tokens with and without the prefix cache."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kernels.providers import load_ops
from shared.messages import JobClass, TextPrompt
from tests.support.models.batches import GREEDY
from tests.support.models.engine import by_sequence
from worker.engine.engine import Engine
from worker.engine.interface import Output, SequenceId, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.forward import Decoder
from worker.model.loading import load_decoder
from worker.model.start import RunnerLimits, start_runner
from worker.text import Tokenizer

CPU = torch.device("cpu")
BLOCK_SIZE = 8
BLOCK_BYTES = BLOCK_SIZE * 2 * 30 * 3 * 64 * 4
"""Keys and values of 30 layers with 3 heads of 64 float32 each."""
MAX_TOKENS = 8
SYSTEM = "You are a patient assistant who answers in one short sentence and never repeats himself. "
QUESTIONS = ["What is rain?", "Who wrote it down?", "What is rain?", "Where? " * 9]
JOB_CLASSES: list[JobClass] = ["batch", "interactive", "batch", "interactive"]


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Decoder:
    return load_decoder(smollm2, dtype="float32", device=CPU, kernels="native", num_threads=1)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Questions after the same system prompt; two of them are equal."""
    return [list(tokenizer.encode(TextPrompt(text=SYSTEM + question))) for question in QUESTIONS]


class Run(NamedTuple):
    first: list[list[int]]
    second: list[list[int]]
    """The prompts of the second turn: the first prompts with their answers and another
    question."""
    num_cached: int
    num_preemptions: int


def run(
    decoder: Decoder,
    prompts: list[list[int]],
    *,
    prefix_cache: bool,
    num_blocks: int = 256,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 256,
) -> Run:
    """Two turns of a chat with each prompt, all at once; every other chat is a batch job."""
    room = RunnerLimits(
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_bytes=num_blocks * BLOCK_BYTES,
    )
    runner = start_runner(decoder, load_ops(), room, has_graphs=False)
    limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens, prefix_cache=prefix_cache)
    engine = Engine(runner, limits)
    try:
        first = answers(engine, "first", prompts)
        turns = [
            prompt + answer + prompts[0][-4:] for prompt, answer in zip(prompts, first, strict=True)
        ]
        second = answers(engine, "second", turns)
        load = engine.load()
        return Run(first, second, load.num_cached_tokens, load.num_preemptions)
    finally:
        engine.close()


def answers(engine: Engine, turn: str, prompts: list[list[int]]) -> list[list[int]]:
    submits = [
        Submit(SequenceId(turn, k), prompt, GREEDY, 0, MAX_TOKENS, job_class=job_class)
        for k, (prompt, job_class) in enumerate(zip(prompts, JOB_CLASSES, strict=True))
    ]
    outputs: list[Output] = []
    for submit in submits:
        outputs += engine.step([submit])
    while engine.has_work:
        outputs += engine.step()
    streams = by_sequence(outputs)
    return [[output.token_id for output in streams[submit.sequence_id]] for submit in submits]


@pytest.fixture(scope="module")
def expected(decoder: Decoder, prompts: list[list[int]]) -> Run:
    """Without the prefix cache."""
    return run(decoder, prompts, prefix_cache=False)


@pytest.mark.parametrize("max_num_batched_tokens", [256, 19], ids=["whole prompts", "chunks"])
def test_what_was_found_in_the_cache_gives_the_same_tokens(
    decoder: Decoder, prompts: list[list[int]], expected: Run, max_num_batched_tokens: int
) -> None:
    found = run(decoder, prompts, prefix_cache=True, max_num_batched_tokens=max_num_batched_tokens)

    assert (found.first, found.second) == (expected.first, expected.second)
    assert expected.num_cached == 0
    assert found.num_cached > 0.5 * sum(map(len, prompts))


def test_so_it_does_where_sequences_are_preempted_and_blocks_are_evicted(
    decoder: Decoder, prompts: list[list[int]], expected: Run
) -> None:
    found = run(
        decoder,
        prompts,
        prefix_cache=True,
        num_blocks=14,
        max_num_seqs=2,
        max_num_batched_tokens=19,
    )

    assert (found.first, found.second) == (expected.first, expected.second)
    assert found.num_preemptions > 0

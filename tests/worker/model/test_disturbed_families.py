"""Every native family with attention: the answers are those of transformers, and neither preemption
nor a prefix in the cache changes a bit of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from shared.messages import SamplingParams
from tests.support.models.engine import by_sequence
from tests.support.models.tiny import (
    FAMILIES,
    LIKE,
    SIZES,
    VOCAB_SIZE,
    WITH_TOWERS,
    native_spec,
    reference_logits,
    write_tiny_model,
)
from tests.worker.model.conftest import TinyModels
from tests.worker.model.test_cache_layout import BLOCK_SIZE, LIMITS, STEP_TOKENS, load, start
from worker.engine.engine import Engine
from worker.engine.interface import EngineLoad, Output, SequenceId, StepOutput, Submit, TokenScore
from worker.engine.scheduler import SchedulerLimits
from worker.model.forward import Decoder
from worker.model.runner import TorchRunner

Answer: TypeAlias = list[tuple[int, TokenScore]]
"""The tokens, and the log probabilities at each of them."""

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2)
SHARED = [(7 * k * k + 1) % VOCAB_SIZE for k in range(3 * BLOCK_SIZE)]
PROMPTS = [[*SHARED, 5], [*SHARED, *range(20, 26)]]
MAX_TOKENS = 40
ROOM = 200
"""Blocks of a cache in which nothing makes way."""
WITHOUT_WINDOWS = ("mistral", "starcoder2", "phimoe")
"""The families with a window in all layers: their sequences do not grow, so that none would be
preempted."""
WITH_ATTENTION = [
    *[
        family
        for family, sizes in FAMILIES.items()
        if not native_spec({"model_type": family, **SIZES, **sizes}).has_states
    ],
    *WITH_TOWERS,
    *LIKE,
]
"""The families without recurrent states, which have tests of their own."""


def write_model(tiny_models: TinyModels, directory: Path, family: str) -> tuple[Path, Any]:
    """The directory and transformers' module of a model whose sequences grow."""
    if family in WITHOUT_WINDOWS:
        return directory, write_tiny_model(directory, family, sliding_window=None)
    return tiny_models(family)


def few_blocks(decoder: Decoder) -> int:
    """The number of blocks in which one of the prompts has room with its answer, but not both."""
    cache = LIMITS.divide(1, decoder.cache_layout(BLOCK_SIZE))
    return cache.num_blocks_for(len(PROMPTS[1]) + MAX_TOKENS)


def serve(runner: TorchRunner, *turns: Sequence[int]) -> tuple[list[list[StepOutput]], EngineLoad]:
    """The outputs of each prompt, and the load at the end. A turn has the numbers of its prompts,
    which are in the engine at the same time."""
    engine = Engine(runner, SchedulerLimits(2, STEP_TOKENS, prefix_cache=True))
    outputs: list[Output] = []
    for numbers in turns:
        outputs += engine.step(
            [Submit(SequenceId(str(k), 0), PROMPTS[k], GREEDY, 0, MAX_TOKENS) for k in numbers]
        )
        while engine.has_work:
            outputs += engine.step()
            engine.check_invariants()
    load_at_end = engine.load()
    engine.close()
    return [stream for _, stream in sorted(by_sequence(outputs).items())], load_at_end


def answers(streams: Sequence[Sequence[StepOutput]]) -> list[Answer]:
    return [
        [(output.token_id, output.score) for output in stream if output.score] for stream in streams
    ]


def assert_greedy(model: Any, prompt: list[int], answer: Answer) -> None:
    """Every token is the token that transformers finds most likely, with the same log probability,
    but for rounding, which differs from processor to processor."""
    token_ids = [token_id for token_id, _ in answer]
    logits = reference_logits(model, [*prompt, *token_ids[:-1]])[len(prompt) - 1 :]
    expected = logits.log_softmax(dim=-1)
    best, _ = expected.topk(2)
    chosen = expected.gather(1, torch.tensor(token_ids).unsqueeze(1))
    found = torch.tensor([score.top_logprobs for _, score in answer])
    assert len(answer) == MAX_TOKENS
    torch.testing.assert_close(chosen, best[:, :1], rtol=0, atol=1e-5)
    torch.testing.assert_close(found, best, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", WITH_ATTENTION)
def test_neither_preemption_nor_a_shared_prefix_changes_an_answer(
    tiny_models: TinyModels, tmp_path: Path, family: str
) -> None:
    directory, model = write_model(tiny_models, tmp_path, family)
    decoder = load(directory, "native")

    alone = [serve(start(decoder, ROOM), [k])[0][0] for k in range(2)]
    pressed, load_at_end = serve(start(decoder, few_blocks(decoder)), [0, 1])
    in_turn, _ = serve(start(decoder, ROOM), [0], [1])

    for prompt, answer in zip(PROMPTS, answers(alone), strict=True):
        assert_greedy(model, prompt, answer)
    assert load_at_end.num_preemptions > 0
    assert answers(pressed) == answers(alone)
    assert in_turn[1][0].num_cached_tokens == len(SHARED)
    assert answers(in_turn) == answers(alone)

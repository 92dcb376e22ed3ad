"""Logprobs of drawn tokens and of prompts, against transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from shared.messages import SamplingParams
from tests.support.models.batches import batch, share
from tests.support.models.tiny import reference_logits, write_tiny_model
from worker.engine.interface import LogitEdits, TokenScore
from worker.model.loading import load_runner
from worker.model.runner import TorchRunner
from worker.model.start import RunnerLimits

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
OTHER = [7, 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, write_tiny_model(directory, "llama", head_dim=16)


@pytest.fixture(params=["reference", "native"])
def runner(model: tuple[Path, Any], request: pytest.FixtureRequest) -> Iterator[TorchRunner]:
    limits = RunnerLimits(kv_cache_bytes=1 << 20)
    runner = load_runner(
        model[0], limits, dtype="float32", device="cpu", kernels=str(request.param)
    )
    yield runner
    runner.close()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, **fields})


def check(score: TokenScore, token_id: int, logprobs: Tensor, depth: int) -> None:
    best = logprobs.topk(depth)
    assert score.logprob == pytest.approx(float(logprobs[token_id]), abs=1e-4)
    assert list(score.top_ids) == best.indices.tolist()
    assert list(score.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_prompt_is_scored_in_chunks_beside_sequences_that_decode(
    model: tuple[Path, Any], runner: TorchRunner
) -> None:
    scored = params(prompt_logprobs=3)
    expected = reference_logits(model[1], PROMPT).log_softmax(dim=-1)
    runner.launch(batch(share(OTHER[:1], [9], is_sampled=False)))
    first = runner.launch(
        batch(
            share(PROMPT[:6], [2], is_sampled=False, sampling=scored, scored_ids=PROMPT[1:7]),
            share(OTHER[1:], [9], start=1, sampling=params(logprobs=1)),
        )
    )
    second = runner.launch(
        batch(
            share(PROMPT[6:], [2], start=6, sampling=scored, scored_start=6, scored_ids=PROMPT[7:])
        )
    )

    scores = first.scores().prompts[0] + second.scores().prompts[0]

    for position, (token_id, score) in enumerate(zip(PROMPT[1:], scores, strict=True)):
        check(score, token_id, expected[position], 3)
    other = reference_logits(model[1], OTHER)[-1].log_softmax(dim=-1)
    check(first.scores().drawn[0], first.result()[0], other, 1)
    assert second.result() == [int(expected[-1].argmax())]


def test_drawn_tokens_are_scored_by_the_logits_before_their_edits(
    model: tuple[Path, Any], runner: TorchRunner
) -> None:
    edits = LogitEdits({17: 100.0}, None, [5], None)
    step = runner.launch(
        batch(
            share(OTHER, [1]),
            share(PROMPT, [2], sampling=params(logprobs=4), edits=edits),
            share(PROMPT, [3], sampling=params(logprobs=0)),
        )
    )

    expected = reference_logits(model[1], PROMPT)[-1].log_softmax(dim=-1)
    assert step.result()[1:] == [17, int(expected.argmax())]
    assert sorted(step.scores().drawn) == [1, 2]
    check(step.scores().drawn[1], 17, expected, 4)
    check(step.scores().drawn[2], int(expected.argmax()), expected, 0)


def test_a_row_is_scored_the_same_alone_and_among_others(runner: TorchRunner) -> None:
    asked = share(PROMPT, [2], sampling=params(logprobs=5))
    alone = runner.launch(batch(asked)).scores().drawn[0]

    others = [share([k, k + 1], [3 + k], sampling=params(logprobs=2)) for k in range(3)]
    among = runner.launch(batch(*others, asked)).scores().drawn[3]

    if runner.decoder.traits.is_row_exact:
        assert among == alone
    assert among.logprob == pytest.approx(alone.logprob, abs=1e-5)


def test_a_step_that_nobody_asks_has_no_scores(runner: TorchRunner) -> None:
    assert runner.launch(batch(share(OTHER, [1]))).scores().drawn == {}

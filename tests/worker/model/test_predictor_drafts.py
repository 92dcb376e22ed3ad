"""A model with a predictor generates the same tokens and logprobs with its drafts as without."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from shared.messages import SamplingParams
from tests.support.models.engine import undrafted
from tests.support.models.predictors import PREDICTING, write_predicting_model
from tests.support.models.tiny import VOCAB_SIZE, write_tiny_model
from tests.worker.checkpoints.gguf_models import write_gguf
from tests.worker.model.test_gguf_families import served_from
from tests.worker.model.test_states import SMALL_STATES, STEP_TOKENS, few_blocks, load, start
from worker.engine.engine import Engine
from worker.engine.interface import EngineLoad, SequenceId, StepOutput, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.forward import Decoder
from worker.model.start import can_check_drafts

MAX_TOKENS = 60
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=0.4, top_p=0.9, ignore_eos=True)
PROMPTS = [[(5 * k * k + 3 * i + 1) % VOCAB_SIZE for k in range(130 + 7 * i)] for i in range(3)]
"""Prompts of several chunks."""


class Answers(NamedTuple):
    outputs: list[StepOutput]
    load: EngineLoad

    @property
    def num_accepted(self) -> int:
        return self.load.num_accepted.get("predictor", 0)


def answers(
    decoder: Decoder, num_blocks: int, kinds: Sequence[SamplingParams], max_draft_tokens: int
) -> Answers:
    """The answers to all prompts at a time, with a prompt for each kind."""
    limits = SchedulerLimits(
        4,
        STEP_TOKENS,
        prefix_cache=True,
        max_draft_tokens=max_draft_tokens,
        prediction_cost=0.1 if max_draft_tokens else None,
    )
    clock = count(step=0.001).__next__  # steps take the same time, whatever they compute
    engine = Engine(start(decoder, num_blocks), limits, clock)
    outputs = list(
        engine.step(
            Submit(SequenceId(str(k), 0), prompt, sampling, k, MAX_TOKENS)
            for k, (prompt, sampling) in enumerate(zip(PROMPTS, kinds, strict=False))
        )
    )
    while engine.has_work:
        outputs += engine.step()
        engine.check_invariants()
    found = engine.load()
    engine.close()
    tokens = [output for output in outputs if isinstance(output, StepOutput)]
    by_sequence = sorted(tokens, key=lambda output: output.sequence_id)  # it keeps the order
    return Answers(undrafted(by_sequence), found)


@pytest.mark.parametrize("family", PREDICTING)
def test_predictions_change_nothing_and_are_accepted(tmp_path: Path, family: str) -> None:
    write_predicting_model(tmp_path, family, is_right=True, vocab_size=512)
    decoder = load(tmp_path)
    assert can_check_drafts(decoder)
    plain = answers(decoder, 400, [SAMPLED, SCORED, SAMPLED], 0)

    drafted = answers(decoder, 400, [SAMPLED, SCORED, SAMPLED], 7)

    assert drafted.outputs == plain.outputs
    assert drafted.num_accepted > 10


def test_a_gguf_file_drafts_as_its_checkpoint_drafts(tmp_path: Path) -> None:
    write_predicting_model(tmp_path, "glm4_moe", is_right=True, vocab_size=512)
    directory = served_from(write_gguf(tmp_path, tmp_path / "tiny.gguf", "glm4moe"))
    stored = answers(load(tmp_path), 400, [SAMPLED, SCORED, SAMPLED], 7)

    drafted = answers(load(directory), 400, [SAMPLED, SCORED, SAMPLED], 7)

    assert drafted.outputs == stored.outputs
    assert drafted.num_accepted == stored.num_accepted > 10


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text"])
def test_predictions_that_are_seldom_right_change_nothing(tmp_path: Path, family: str) -> None:
    write_predicting_model(tmp_path, family, **SMALL_STATES.get(family, {}))
    decoder = load(tmp_path)
    kinds = [GREEDY, SAMPLED, GREEDY]
    plain = answers(decoder, 400, kinds, 0)

    drafted = answers(decoder, 400, kinds, 7)
    pressed = answers(decoder, few_blocks(decoder), kinds, 7)

    assert drafted.load.num_drafted["predictor"] > drafted.num_accepted
    assert pressed.load.num_preemptions > 0
    for other in (drafted, pressed):
        assert [o.token_id for o in other.outputs] == [o.token_id for o in plain.outputs]


def test_a_checkpoint_whose_predictor_cannot_be_read_is_served_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_predicting_model(tmp_path, "glm4_moe")
    whole = load(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.3.mlp.gate.weight"]
    save_file(tensors, path)

    without = load(tmp_path)

    assert "the layer that predicts tokens is not used" in caplog.messages
    costs = [decoder.traits.prediction_cost for decoder in (whole, without)]
    assert [cost is None for cost in costs] == [False, True]
    num_places = [decoder.cache_layout(16).num_places for decoder in (whole, without)]
    assert num_places == [4, 3]


@pytest.mark.parametrize("family", ["glm4_moe", "mimo", "qwen3_5_text"])
def test_kernels_that_do_not_predict_leave_a_predictor_out(tmp_path: Path, family: str) -> None:
    write_predicting_model(tmp_path, family)

    decoder = load(tmp_path, "reference")

    assert decoder.traits.prediction_cost is None


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_checkpoint_without_a_predictor_has_no_place_for_it(tmp_path: Path, kernels: str) -> None:
    write_tiny_model(tmp_path, "glm4_moe")
    decoder = load(tmp_path, kernels)

    assert decoder.traits.prediction_cost is None
    assert decoder.cache_layout(16).num_places == decoder.num_layers

"""SmolLM2 generates the same tokens and logprobs with drafts as without."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kernels.providers import load_ops
from shared.messages import Constraint, SamplingParams, TextPrompt
from tests.support.models.batches import GREEDY
from tests.support.models.engine import undrafted
from worker.decode.constraints import Constraints
from worker.engine.engine import Engine
from worker.engine.interface import EngineLoad, SequenceId, StepOutput, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.loading import load_decoder
from worker.model.runner import TorchRunner
from worker.model.start import can_check_drafts
from worker.text import Tokenizer

CPU = torch.device("cpu")
NUM_TOKENS = 40
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, logprobs=2, ignore_eos=True)


class Answers(NamedTuple):
    outputs: list[StepOutput]
    load: EngineLoad


@pytest.fixture(scope="module", params=["bfloat16", "q4_1"])
def runner(smollm2: Path, request: pytest.FixtureRequest) -> Iterator[TorchRunner]:
    is_packed = request.param == "q4_1"
    decoder = load_decoder(
        smollm2,
        dtype="auto" if is_packed else request.param,
        weight_format=request.param if is_packed else "auto",
        device=CPU,
        num_threads=1,
    )
    assert can_check_drafts(decoder)
    block = BlockShape(
        decoder.num_layers, 16, decoder.num_kv_heads, decoder.head_dim, decoder.dtype
    )
    runner = TorchRunner(
        decoder,
        KVCache.allocate(block, 64, CPU),
        load_ops("native"),
        max_seq_len=512,
        max_num_batched_tokens=512,
    )
    yield runner
    runner.close()


@pytest.fixture
def repetitive(tokenizer: Tokenizer) -> list[int]:
    sentence = "The lighthouse keeper wrote down the weather every evening. "
    return list(tokenizer.encode(TextPrompt(text=sentence * 4)))


def answers(runner: TorchRunner, submits: list[Submit], max_draft_tokens: int) -> Answers:
    limits = SchedulerLimits(8, 512, prefix_cache=False, max_draft_tokens=max_draft_tokens)
    clock = count(step=0.001).__next__  # steps take the same time, whatever they compute
    engine = Engine(runner, limits, clock)
    outputs = list(engine.step(submits))
    while engine.has_work:
        outputs += engine.step()
    tokens = [output for output in outputs if isinstance(output, StepOutput)]
    by_sequence = sorted(tokens, key=lambda output: output.sequence_id)  # it keeps the order
    return Answers(undrafted(by_sequence), engine.load())


async def test_drafts_of_constrained_output_change_nothing(
    runner: TorchRunner, repetitive: list[int], tokenizer: Tokenizer
) -> None:
    properties = {name: {"type": "integer"} for name in ("temperature", "pressure")}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    constraint = Constraint(kind="json_schema", source=json.dumps(schema))
    grammar = await Constraints(tokenizer).compile(constraint)

    def submits() -> list[Submit]:
        matcher = grammar.matcher((), None)
        identity = SequenceId("s", 0)
        return [Submit(identity, repetitive, GREEDY, 3, NUM_TOKENS, constraint=matcher)]

    plain = answers(runner, submits(), max_draft_tokens=0)

    drafted = answers(runner, submits(), max_draft_tokens=7)

    assert drafted.outputs == plain.outputs
    assert drafted.load.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("runner", "sampling"),
    [
        pytest.param("bfloat16", SAMPLED, id="bfloat16, sampled"),
        pytest.param("q4_1", GREEDY, id="q4_1, greedy"),
        pytest.param("q4_1", SAMPLED, id="q4_1, sampled"),
        pytest.param("q4_1", SCORED, id="q4_1, scored"),
    ],
    indirect=["runner"],
    scope="module",
)
def test_drafts_change_nothing(
    runner: TorchRunner, repetitive: list[int], sampling: SamplingParams
) -> None:
    submits = [
        Submit(SequenceId(f"s{k}", 0), repetitive[: 50 - 9 * k], sampling, k, NUM_TOKENS)
        for k in range(2)
    ]
    plain = answers(runner, submits, max_draft_tokens=0)

    drafted = answers(runner, submits, max_draft_tokens=7)

    assert drafted.outputs == plain.outputs
    assert drafted.load.num_accepted_tokens > 0

"""A stream of any native family that moves to another worker continues with the same tokens."""

from collections.abc import Sequence

import pytest
import torch

from kernels.providers import load_ops
from shared.messages import SamplingParams
from tests.support.models.tiny import FAMILIES, VOCAB_SIZE, WITH_TOWERS
from tests.worker.model.conftest import TinyModels
from worker.engine.engine import Engine
from worker.engine.interface import SequenceId, StepOutput, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.forward import Decoder
from worker.model.loading import load_decoder
from worker.model.start import RunnerLimits, start_runner

DRAWN = SamplingParams(temperature=1.0, ignore_eos=True)
"""A drawn token changes with smaller differences of logits than the most likely token does."""
PROMPT = [(7 * k * k + 1) % VOCAB_SIZE for k in range(21)]
MAX_TOKENS = 7
STEP_TOKENS = 16
LIMITS = RunnerLimits(
    block_size=4, max_num_seqs=2, max_num_batched_tokens=STEP_TOKENS, kv_cache_bytes=1 << 21
)


def stream(decoder: Decoder, known: Sequence[int] = ()) -> list[int]:
    """The tokens that a new worker draws after these tokens of the answer."""
    runner = start_runner(decoder, load_ops(), LIMITS, has_graphs=False)
    engine = Engine(runner, SchedulerLimits(2, STEP_TOKENS, prefix_cache=True))
    name = SequenceId("moved", 0)
    submit = Submit(name, PROMPT, DRAWN, 5, MAX_TOKENS, frozenset(), tuple(known))
    outputs = list(engine.step([submit]))
    while engine.has_work:
        outputs += engine.step()
    engine.close()
    return [output.token_id for output in outputs if isinstance(output, StepOutput)]


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_TOWERS])
def test_a_stream_that_moves_at_any_token_stays_the_same(
    tiny_models: TinyModels, family: str
) -> None:
    directory, _ = tiny_models(family)
    here, there = (
        load_decoder(directory, dtype="float32", device=torch.device("cpu"), kernels="native")
        for _ in range(2)
    )
    whole = stream(here)
    assert len(whole) == MAX_TOKENS

    for num_known in range(1, MAX_TOKENS):
        known = whole[:num_known]
        assert [*known, *stream(there, known)] == whole

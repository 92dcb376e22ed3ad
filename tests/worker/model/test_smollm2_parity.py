"""SmolLM2 through engine and runner generates the tokens of transformers, for any step sizes."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kernels.providers import load_ops
from shared.messages import SamplingParams, TextPrompt
from tests.support.models.batches import GREEDY, batch, share
from tests.support.models.engine import by_sequence
from tests.support.models.numerics import assert_close
from worker.engine.engine import Engine
from worker.engine.interface import Output, SequenceId, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.forward import Decoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.loading import load_decoder
from worker.model.runner import TorchRunner
from worker.text import Tokenizer

CPU = torch.device("cpu")
MAX_TOKENS = 9
"""All but the last are stored, so that each sequence comes to need a further block of 8."""
PROMPT_LENS = [1, 7, 8, 9, 15, 17, 31, 33, 40, 65]
TEXT = (
    "The lighthouse keeper wrote down the weather every evening. On the first day of spring the "
    "wind came from the south, and with it a small boat without a sail. Nobody was on board, but "
    "under the bench lay a letter, dry and sealed, with a name that he had not heard for twenty "
    "years. He put it on the table, made tea, and looked at it until the lamp had to be lit. "
)


@pytest.fixture(scope="session")
def decoder(smollm2: Path) -> Decoder:
    return load_decoder(smollm2, dtype="float32", device=CPU, kernels="native", num_threads=1)


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids that start at different words."""
    token_ids = list(tokenizer.encode(TextPrompt(text=TEXT * 4)))
    return [token_ids[3 * i : 3 * i + length] for i, length in enumerate(PROMPT_LENS)]


@pytest.fixture(scope="session")
def expected(smollm2: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy tokens of transformers, in a batch with padding on the left."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    longest = max(PROMPT_LENS)
    generated = model.generate(
        torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts]),
        attention_mask=torch.tensor(
            [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        ),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    token_ids: list[list[int]] = generated[:, longest:].tolist()
    return token_ids


class Cut(NamedTuple):
    """How the work is split into steps."""

    block_size: int
    max_num_batched_tokens: int = 512
    num_blocks: int = 256
    arrivals_per_step: int = 1


def make_runner(decoder: Decoder, cut: Cut) -> TorchRunner:
    block = BlockShape(
        decoder.num_layers, cut.block_size, decoder.num_kv_heads, decoder.head_dim, decoder.dtype
    )
    cache = KVCache.allocate(block, cut.num_blocks, CPU)
    # A read of a slot that was never written shows in the result.
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return TorchRunner(
        decoder,
        cache,
        load_ops(),
        max_seq_len=min(decoder.max_seq_len, cut.block_size * cut.num_blocks),
        max_num_batched_tokens=cut.max_num_batched_tokens,
    )


class Answers(NamedTuple):
    token_ids: list[list[int]]
    num_preemptions: int


def run(decoder: Decoder, cut: Cut, submits: Sequence[Submit]) -> Answers:
    """Submit sequences in turn and collect their tokens."""
    engine = Engine(make_runner(decoder, cut), SchedulerLimits(16, cut.max_num_batched_tokens))
    answers: dict[SequenceId, list[int]] = {submit.sequence_id: [] for submit in submits}
    arriving: Iterator[Submit] = iter(submits)
    try:
        while True:
            joining = list(itertools.islice(arriving, cut.arrivals_per_step))
            collect(engine.step(joining), answers)
            if not joining and not engine.has_work:
                return Answers(list(answers.values()), engine.load().num_preemptions)
    finally:
        engine.close()


def collect(outputs: Sequence[Output], answers: dict[SequenceId, list[int]]) -> None:
    for sequence_id, tokens in by_sequence(outputs).items():
        answers[sequence_id] += [output.token_id for output in tokens]


def submit(
    name: int, prompt_ids: list[int], sampling: SamplingParams = GREEDY, seed: int = 0
) -> Submit:
    return Submit(SequenceId(str(name), 0), prompt_ids, sampling, seed, MAX_TOKENS)


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(Cut(8, max_num_batched_tokens=37), id="blocks of 8, chunks"),
        pytest.param(Cut(32, arrivals_per_step=3), id="blocks of 32, three at a time"),
    ],
)
def test_sequences_that_join_at_different_steps_say_what_transformers_says(
    decoder: Decoder, prompts: list[list[int]], expected: list[list[int]], cut: Cut
) -> None:
    answers = run(decoder, cut, [submit(i, ids) for i, ids in enumerate(prompts)])
    assert answers.token_ids == expected


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(Cut(2, num_blocks=88, arrivals_per_step=16), id="whole prompts"),
        pytest.param(
            Cut(2, num_blocks=60, max_num_batched_tokens=50, arrivals_per_step=16), id="chunks"
        ),
    ],
)
def test_preempted_sequences_say_what_transformers_says(
    decoder: Decoder, prompts: list[list[int]], expected: list[list[int]], cut: Cut
) -> None:
    answers = run(decoder, cut, [submit(i, ids) for i, ids in enumerate(prompts)])
    assert answers.num_preemptions > 0
    assert answers.token_ids == expected


def test_the_reference_kernels_say_what_transformers_says(
    smollm2: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Preempted, and in chunks. They are slow, so without the longest prompts; tiny models prove
    the rest."""
    decoder = load_decoder(smollm2, dtype="float32", device=CPU, kernels="reference")
    cut = Cut(2, num_blocks=24, max_num_batched_tokens=20, arrivals_per_step=16)

    answers = run(decoder, cut, [submit(i, ids) for i, ids in enumerate(prompts[:5])])

    assert answers.num_preemptions > 0
    assert answers.token_ids == expected[:5]


def test_bfloat16_agrees_with_float32(
    smollm2: Path, decoder: Decoder, prompts: list[list[int]]
) -> None:
    """To 4 % of the greatest logit: 8 bits of mantissa through 30 layers."""
    rounded = load_decoder(smollm2, dtype="bfloat16", device=CPU, kernels="native")
    logits = []
    for model in (rounded, decoder):
        block = BlockShape(model.num_layers, 16, model.num_kv_heads, model.head_dim, model.dtype)
        cache = KVCache.allocate(block, 32, CPU)
        shares = [share(prompts[8], range(10)), share(prompts[9], range(10, 20))]
        with torch.inference_mode():
            inputs = build_inputs(batch(*shares), 16, CPU).forward
            logits.append(model.forward(inputs, cache).clone())
    assert rounded.dtype == torch.bfloat16
    assert_close(logits[0], logits[1], 0.04)


@pytest.mark.parametrize(
    ("dtype", "weight_format"), [("float32", "auto"), ("bfloat16", "auto"), ("auto", "q4_1")]
)
def test_native_tokens_do_not_depend_on_the_batch_or_on_how_steps_are_cut(
    smollm2: Path, prompts: list[list[int]], dtype: str, weight_format: str
) -> None:
    """Equal in every bit: tokens drawn at a high temperature would show any difference."""
    decoder = load_decoder(
        smollm2,
        dtype=dtype,
        weight_format=weight_format,
        device=CPU,
        kernels="native",
        num_threads=2,
    )
    samplings = [
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=2.0, top_p=0.9),
        GREEDY,
        SamplingParams(temperature=2.0, top_k=40),
    ]
    submits = [
        submit(i, ids, samplings[i % len(samplings)], seed=i) for i, ids in enumerate(prompts[1::2])
    ]
    alone = [run(decoder, Cut(16), [one]).token_ids[0] for one in submits[1::2]]
    together = run(decoder, Cut(32, arrivals_per_step=3), submits).token_ids
    cut = Cut(2, num_blocks=45, max_num_batched_tokens=50, arrivals_per_step=16)
    chunked = run(decoder, cut, submits)
    assert chunked.num_preemptions > 0
    assert chunked.token_ids == together
    assert together[1::2] == alone

"""Two-phase steps: launched in order, computed elsewhere, chained on the device."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.providers import Provider, load_ops
from tests.support.models.batches import batch, share
from tests.support.models.tiny import VOCAB_SIZE, write_tiny_model
from worker.engine.interface import ModelRunner, StepFailed
from worker.model.forward import Decoder, ForwardInputs, Traits
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.loading import load_runner
from worker.model.runner import TorchRunner
from worker.model.start import RunnerLimits

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
BLOCKS = [2, 0, 3]
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_tiny_model(directory, "llama")
    return directory


@pytest.fixture
def runner(model: Path) -> Iterator[ModelRunner]:
    runner = load_runner(
        model, RunnerLimits(max_num_batched_tokens=16), dtype="float32", device="cpu"
    )
    yield runner
    runner.close()


def waiting(runner: ModelRunner, num_tokens: int) -> list[int]:
    """Greedy tokens of PROMPT; the host passes each step's token to the next."""
    tokens = runner.launch(batch(share(PROMPT, BLOCKS))).result()
    while len(tokens) < num_tokens:
        start = len(PROMPT) + len(tokens) - 1
        tokens += runner.launch(batch(share(tokens[-1:], BLOCKS, start=start))).result()
    return tokens


def test_steps_that_carry_tokens_on_the_device_give_what_waiting_gives(
    runner: ModelRunner,
) -> None:
    expected = waiting(runner, 8)
    handles = [runner.launch(batch(share(PROMPT, BLOCKS)))]
    for start in range(len(PROMPT), len(PROMPT) + 7):
        step = batch(share([0], BLOCKS, start=start, previous_row=0))
        handles.append(runner.launch(step))
    assert [handle.result() for handle in handles] == [[token] for token in expected]


def test_a_row_is_carried_to_wherever_its_sequence_goes(runner: ModelRunner) -> None:
    expected = waiting(runner, 2)
    other = share([7, 7], [4])
    runner.launch(batch(other, share(PROMPT, BLOCKS)))
    carried = share([0], BLOCKS, start=len(PROMPT), previous_row=1)
    step = runner.launch(batch(carried, share([7], [4], start=2)))
    assert step.result()[0] == expected[1]


def test_a_step_that_samples_nothing_gives_nothing(runner: ModelRunner) -> None:
    assert runner.launch(batch(share(PROMPT, BLOCKS, is_sampled=False))).result() == []


def test_a_batch_beyond_the_limit_is_refused_with_both(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="17 tokens, at most 16"):
        runner.launch(batch(share([1] * 17, BLOCKS)))


def test_a_closed_runner_finishes_what_was_launched_and_takes_no_more(model: Path) -> None:
    runner = load_runner(model, dtype="float32", device="cpu")
    handle = runner.launch(batch(share(PROMPT, BLOCKS)))
    runner.close()
    assert len(handle.result()) == 1
    with pytest.raises(RuntimeError):
        runner.launch(batch(share(PROMPT, BLOCKS)))


class GatedDecoder(Decoder):
    """Predicts token + 1. Computes a step when it is allowed to, and fails on tokens 98 and 99."""

    num_layers = num_kv_heads = head_dim = 1
    vocab_size = VOCAB_SIZE
    max_seq_len = 64
    dtype = torch.float32
    device = torch.device("cpu")
    provider: Provider = "reference"
    traits = Traits(numerics="gated")

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        assert self.allowed.acquire(timeout=PATIENCE_S)
        token_ids = inputs.token_ids[inputs.sampled_rows]
        if (token_ids == 98).any():
            raise torch.OutOfMemoryError("98")
        if (token_ids == 99).any():
            raise ArithmeticError("token 99")
        return torch.nn.functional.one_hot(token_ids + 1, VOCAB_SIZE).float()


@pytest.fixture
def decoder() -> GatedDecoder:
    return GatedDecoder()


@pytest.fixture
def gated(decoder: Decoder) -> Iterator[TorchRunner]:
    block = BlockShape(1, 8, 1, 1, torch.float32)
    cache = KVCache.allocate(block, 4, decoder.device)
    runner = TorchRunner(decoder, cache, load_ops(), max_seq_len=64, max_num_batched_tokens=64)
    yield runner
    runner.close()


def test_launch_returns_before_the_step_is_computed(
    gated: TorchRunner, decoder: GatedDecoder
) -> None:
    first = gated.launch(batch(share([5], [0])))
    second = gated.launch(batch(share([0], [0], start=1, previous_row=0)))
    decoder.allowed.release(2)
    assert (first.result(), second.result()) == ([6], [7])


def test_a_result_is_sent_while_the_next_step_computes(
    gated: TorchRunner, decoder: GatedDecoder
) -> None:
    first = gated.launch(batch(share([5], [0])))
    gated.launch(batch(share([0], [0], start=1, previous_row=0)))
    decoder.allowed.release()
    assert first.result() == [6]
    decoder.allowed.release()


def test_a_result_does_not_wait_for_what_is_done_between_steps(
    gated: TorchRunner, decoder: GatedDecoder
) -> None:
    may_end = threading.Event()
    first = gated.launch(batch(share([5], [0])))
    between = gated.submit(lambda: may_end.wait(PATIENCE_S))
    gated.launch(batch(share([0], [0], start=1, previous_row=0)))
    decoder.allowed.release(2)
    assert first.result() == [6]
    assert not between.done()
    may_end.set()


def test_a_step_that_fails_raises_in_its_result_and_is_not_gone_on_from(
    gated: TorchRunner, decoder: GatedDecoder
) -> None:
    decoder.allowed.release(4)
    runner_steps = [
        gated.launch(batch(share([5], [0]))),
        gated.launch(batch(share([99], [0]))),
        gated.launch(batch(share([0], [0], start=1, previous_row=0))),
        gated.launch(batch(share([8], [0]))),
    ]
    assert runner_steps[0].result() == [6]
    with pytest.raises(ArithmeticError, match="token 99"):
        runner_steps[1].result()
    with pytest.raises(StepFailed, match="the step before this one failed"):
        runner_steps[2].result()
    assert runner_steps[3].result() == [9]


def test_a_step_without_memory_says_so_and_the_next_is_computed(
    gated: TorchRunner, decoder: GatedDecoder
) -> None:
    decoder.allowed.release(2)
    failed, following = gated.launch(batch(share([98], [0]))), gated.launch(batch(share([5], [0])))
    with pytest.raises(StepFailed, match="no memory"):
        failed.result()
    assert following.result() == [6]


class PredictingDecoder(GatedDecoder):
    """Predicts token + 2 behind the next token."""

    traits = Traits(numerics="gated", prediction_cost=0.1)

    def __init__(self) -> None:
        super().__init__()
        self.allowed.release(100)
        self.kept: list[list[int]] = []
        """The tokens that follow the tokens of each step."""

    def predict(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        self.kept.append(inputs.token_ids.tolist())
        token_ids = inputs.token_ids[inputs.sampled_rows]
        return torch.nn.functional.one_hot(token_ids + 2, VOCAB_SIZE).float()


@pytest.mark.parametrize("decoder", [PredictingDecoder()])
def test_a_prediction_follows_the_last_drawn_token_that_counts(
    gated: TorchRunner, decoder: PredictingDecoder
) -> None:
    step = gated.launch(
        batch(
            share([5], [0], is_predicted=True),
            share([20, 30, 31], [1], is_sampled=False, next_id=32),
            share([40, 41, 50], [2], num_drafts=2, is_predicted=True),
            share([60, 61], [3], num_drafts=1),
        )
    )

    assert step.result() == [6, 41, 42, 51, 61, 62]
    assert step.scores().predicted == [8, 44]
    assert decoder.kept == [[6, 30, 31, 32, 41, 42, 51, 61, 62]]


@pytest.mark.parametrize("decoder", [PredictingDecoder()])
def test_decodes_without_predictions_keep_nothing_for_them(
    gated: TorchRunner, decoder: PredictingDecoder
) -> None:
    assert gated.launch(batch(share([5], [0]), share([7], [1]))).result() == [6, 8]
    assert decoder.kept == []

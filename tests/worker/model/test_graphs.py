"""Recorded decode steps: padded, at fixed addresses, and equal to any other step."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kernels.providers import Provider, load_ops
from tests.kernels.interpreter import quick_interpreter
from tests.support.models.batches import batch, share
from tests.support.models.numerics import assert_close
from tests.support.models.tiny import VOCAB_SIZE, native_spec, write_tiny_model
from worker.checkpoints.checkpoint import Checkpoint
from worker.engine.interface import ScheduledBatch, ScheduledSequence
from worker.model.config import read_json_config
from worker.model.decoders.stack import StackDecoder
from worker.model.graphs import CudaRecorder, DecodeGraphs, DeviceWork, ladder
from worker.model.inputs import build_inputs, lay_out
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.runner import TorchRunner
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.interface import Target
from worker.model.weights.layers import WeightReader, read_weights

__all__ = ["quick_interpreter"]

BLOCK_SIZE = 16
MAX_SEQ_LEN = 96
SIZES = ladder(11)
CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def again(work: DeviceWork) -> DeviceWork:
    """A `Record` for devices without graphs: runs the work at the addresses it was given."""
    work()
    return work


def loaded(
    directory: Path, device: torch.device, provider: Provider, *, is_batch_invariant: bool = False
) -> StackDecoder:
    config = native_spec(read_json_config(directory))
    target = Target(torch.float32, device)
    weights = read_weights(WeightReader(Checkpoint(directory), config, Dense(), target))
    ops = load_ops(provider, is_batch_invariant=is_batch_invariant)
    return StackDecoder(config, weights, ops, MAX_SEQ_LEN)


def filled_cache(decoder: StackDecoder, num_blocks: int) -> KVCache:
    block = BlockShape(
        decoder.num_layers, BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim, decoder.dtype
    )
    cache = KVCache.allocate(block, num_blocks, decoder.device)
    torch.manual_seed(1)
    for values in (cache.keys, cache.values):
        values.copy_(torch.randn(values.shape))
    return cache


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_tiny_model(directory, "qwen3")
    return directory


@pytest.fixture(scope="module")
def decoder(directory: Path) -> StackDecoder:
    return loaded(directory, CPU, "reference")


@pytest.fixture
def cache(decoder: StackDecoder) -> KVCache:
    return filled_cache(decoder, 64)


@pytest.fixture
def graphs(decoder: StackDecoder, cache: KVCache) -> DecodeGraphs:
    return DecodeGraphs(decoder, cache, SIZES, again, max_seq_len=MAX_SEQ_LEN)


def decodes(num_seqs: int, seed: int) -> ScheduledBatch:
    """Single tokens after contexts of any length, each sequence in blocks of its own."""
    draw = random.Random(seed)
    blocks = draw.sample(range(64), 64)
    shares: list[ScheduledSequence] = []
    for k in range(num_seqs):
        start = draw.randrange(MAX_SEQ_LEN - 16)
        own = blocks[5 * k : 5 * k + start // BLOCK_SIZE + 1]
        shares.append(share([draw.randrange(VOCAB_SIZE)], own, start=start))
    return batch(*shares)


def max_error(device: torch.device) -> float:
    """A GPU's attention uses three products of shorter numbers for float32."""
    return 1e-5 if device.type == "cpu" else 1e-4


def check_steps(
    decoder: StackDecoder,
    cache: KVCache,
    graphs: DecodeGraphs,
    sizes: Sequence[int] = (1, 11, 3, 8, 2, 10, 5, 1),
) -> None:
    """Steps of growing and shrinking size, each of which finds the leftovers of others."""
    for num_seqs in sizes:
        step = decodes(num_seqs, seed=num_seqs)
        padded = lay_out(step, BLOCK_SIZE, decoder.device, graphs.size_for)
        with torch.inference_mode():
            expected = decoder.forward(
                build_inputs(step, BLOCK_SIZE, decoder.device).forward, cache
            )
            kept = cache.keys.clone(), cache.values.clone()
            got = graphs.logits(padded.send().forward)
        assert len(got) == padded.graph_size
        assert_close(got[:num_seqs].cpu(), expected.cpu(), max_error(decoder.device))
        assert got.isfinite().all(), "padding attends to something"
        for values, before in zip((cache.keys, cache.values), kept, strict=True):
            torch.testing.assert_close(values, before, msg="padding wrote into the cache")


def test_the_ladder_holds_small_sizes_and_the_largest() -> None:
    assert ladder(1) == [1]
    assert ladder(20) == [1, 2, 4, 8, 16, 20]
    assert ladder(300)[-5:] == [248, 256, 272, 288, 300]
    for most in range(1, 600, 7):
        sizes = ladder(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most


def test_the_largest_graph_is_recorded_first_and_progress_is_reported(
    decoder: StackDecoder, cache: KVCache
) -> None:
    told: list[tuple[int, int]] = []
    sizes: list[int] = []
    graphs = DecodeGraphs(
        decoder,
        cache,
        SIZES,
        lambda work: (sizes.append(len(told)), work)[1],  # type: ignore[func-returns-value]
        max_seq_len=MAX_SEQ_LEN,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(k + 1, len(SIZES)) for k in range(len(SIZES))]
    assert [graphs.size_for(n) for n in (1, 3, 5, 9, 11, 12)] == [1, 4, 8, 11, 11, None]


def test_padded_steps_give_the_logits_of_plain_ones_and_write_nothing_else(
    decoder: StackDecoder, cache: KVCache, graphs: DecodeGraphs
) -> None:
    check_steps(decoder, cache, graphs)


def test_padded_steps_keep_the_states_of_others(tmp_path: Path) -> None:
    """Padding has block 0 in its table, which belongs to a sequence here."""
    write_tiny_model(tmp_path, "lfm2")
    decoder = loaded(tmp_path, CPU, "reference")
    layout = decoder.cache_layout(BLOCK_SIZE)
    assert layout.state is not None
    count = layout.state.num_blocks
    block = BlockShape(
        layout.num_places, BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim, decoder.dtype
    )
    caches = [KVCache.allocate(block, 2 + 4 * count, CPU, layout) for _ in range(2)]
    graphs = DecodeGraphs(decoder, caches[1], [3], again, max_seq_len=BLOCK_SIZE)
    states = [range(k * count, (k + 1) * count) for k in range(4)]
    for start in range(3):
        step = batch(
            *(
                share(
                    [start + 5 * row],
                    [4 * count + row],
                    start=start,
                    states=[*states[2 * row + 1 - start % 2], *states[2 * row + start % 2]][
                        0 if start else count :
                    ],
                )
                for row in range(2)
            )
        )
        padded = lay_out(step, BLOCK_SIZE, CPU, graphs.size_for, layout)
        with torch.inference_mode():
            inputs = build_inputs(step, BLOCK_SIZE, CPU, layout).forward
            expected = decoder.forward(inputs, caches[0])
            got = graphs.logits(padded.send().forward)
        assert_close(got[:2], expected, max_error(CPU))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_the_triton_kernels_skip_the_padding_too(
    directory: Path, is_batch_invariant: bool, decoder: StackDecoder
) -> None:
    """On the CPU in Triton's interpreter."""
    device = CUDA if torch.cuda.is_available() else CPU
    theirs = loaded(directory, device, "triton", is_batch_invariant=is_batch_invariant)
    cache = filled_cache(theirs, 64)
    graphs = DecodeGraphs(theirs, cache, [1, 3], lambda work: work, max_seq_len=MAX_SEQ_LEN)
    check_steps(theirs, cache, graphs, (2,))

    step = build_inputs(decodes(2, seed=0), BLOCK_SIZE, device).forward
    own = build_inputs(decodes(2, seed=0), BLOCK_SIZE, CPU).forward
    with torch.inference_mode():
        got = theirs.forward(step, filled_cache(theirs, 64))
        expected = decoder.forward(own, filled_cache(decoder, 64))
    assert_close(got.cpu(), expected, max_error(device))


def tokens(runner: TorchRunner) -> list[list[int]]:
    """A prompt and decodes of 3 sequences, each token handed on by the device."""
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3]]
    first = batch(*(share(prompt, [2 * k, 2 * k + 1]) for k, prompt in enumerate(prompts)))
    handles = [runner.launch(first)]
    for step in range(6):
        decoding = (
            share([0], [2 * k, 2 * k + 1], start=len(prompt) + step, previous_row=k)
            for k, prompt in enumerate(prompts)
        )
        handles.append(runner.launch(batch(*decoding)))
    return [handle.result() for handle in handles]


@pytest.fixture
def runners(
    decoder: StackDecoder, cache: KVCache, graphs: DecodeGraphs
) -> Iterator[list[TorchRunner]]:
    runners = [
        TorchRunner(
            decoder,
            cache,
            load_ops(),
            max_seq_len=MAX_SEQ_LEN,
            max_num_batched_tokens=32,
            graphs=chosen,
        )
        for chosen in (None, graphs)
    ]
    yield runners
    for runner in runners:
        runner.close()


def test_a_runner_with_graphs_draws_what_one_without_draws(runners: list[TorchRunner]) -> None:
    plain, recorded = map(tokens, runners)
    assert recorded == plain


@pytest.mark.gpu
def test_cuda_graphs_give_the_logits_of_plain_steps(directory: Path) -> None:
    decoder = loaded(directory, CUDA, "triton")
    cache = filled_cache(decoder, 64)
    graphs = DecodeGraphs(decoder, cache, SIZES, CudaRecorder(), max_seq_len=MAX_SEQ_LEN)
    check_steps(decoder, cache, graphs)

"""The budget of a GPU's memory, as far as it can be tested without a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.providers import load_ops
from tests.support.models.batches import GREEDY
from tests.support.models.engine import by_sequence, new_submit
from tests.support.models.tiny import write_tiny_model
from worker.engine.engine import Engine
from worker.engine.interface import StepOutput
from worker.engine.scheduler import SchedulerLimits
from worker.engine.step_plan import MAX_SCORED_TOKENS
from worker.model.cache_layout import one_group
from worker.model.gpu_memory import DeviceMemory, largest_step, measure, run_step, too_large
from worker.model.inputs import lay_out
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.loading import load_decoder, load_runner
from worker.model.runner import use_device
from worker.model.start import RunnerLimits


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1"])
def test_a_thread_finds_its_device_with_and_without_a_number(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch itself rejects a device without a number."""
    chosen: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    use_device(torch.device(name))
    assert chosen == [int(name == "cuda:1")]


def test_the_cache_gets_what_the_rest_leaves_of_the_share() -> None:
    memory = DeviceMemory(total=1000, used=300, activations=50, graphs=20)
    assert (memory.left(0.9), memory.left(0.3)) == (530, 0)


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(1, 7), (5, 23), (8, 8), (3, 64)])
def test_the_largest_step_has_all_tokens_and_draws_all_it_may(
    num_seqs: int, num_tokens: int
) -> None:
    batch = largest_step(num_seqs, num_tokens, block_size=4)
    assert (batch.num_tokens, len(batch.sequences)) == (num_tokens, num_seqs)
    assert all(sequence.is_sampled for sequence in batch.sequences)
    assert [len(s.scored_ids) for s in batch.sequences] == [
        s.num_tokens - 1 for s in batch.sequences
    ]
    blocks = [block for sequence in batch.sequences for block in sequence.block_tables[0]]
    assert blocks == list(range(len(blocks)))
    assert max(s.num_tokens for s in batch.sequences) <= -(-num_tokens // num_seqs)


def test_the_largest_step_scores_as_many_tokens_as_a_step_may() -> None:
    batch = largest_step(64, 512, block_size=16)
    step = lay_out(batch, 16, torch.device("cpu")).send()
    assert len(step.forward.sampled_rows) == 64 + MAX_SCORED_TOKENS
    assert step.scores is not None
    assert len(step.scores.score_rows) == 64 + MAX_SCORED_TOKENS
    assert len(set(step.forward.sampled_rows.tolist())) == 64 + MAX_SCORED_TOKENS


def test_the_largest_step_can_be_computed(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    decoder = load_decoder(tmp_path, dtype="float32", device=torch.device("cpu"))
    batch = largest_step(4, 50, block_size=8)
    block = BlockShape(decoder.num_layers, 8, decoder.num_kv_heads, decoder.head_dim, decoder.dtype)
    run_step(decoder, load_ops(), KVCache.allocate(block, 8, decoder.device), batch)


def test_a_step_that_is_too_large_names_the_memory_and_the_options_to_lower() -> None:
    error = too_large(largest_step(64, 8192, block_size=16), free=700 << 20, total=16 << 30)

    assert str(error) == (
        "a step of 8192 tokens and 64 sequences needs more than the 700.0 MiB of memory that are "
        "free beside the weights (the device has 16.00 GiB): lower --max-num-batched-tokens or "
        "--max-num-seqs"
    )


@pytest.mark.gpu
def test_a_gpu_has_its_memory_back_after_it_was_measured(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    device = torch.device("cuda")
    decoder = load_decoder(tmp_path, dtype="float16", device=device)
    block = BlockShape(
        decoder.num_layers, 16, decoder.num_kv_heads, decoder.head_dim, decoder.dtype
    )
    before = torch.cuda.memory_allocated()

    found = measure(
        decoder,
        load_ops("triton"),
        block,
        one_group(decoder.num_layers),
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_seq_len=256,
        graph_sizes=[1, 8, 32],
    )

    # The workspaces of cuBLAS remain, one for each stream.
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == before
    assert 0 < found.activations < found.total // 100
    assert 0 <= found.graphs < found.total // 10
    assert found.used < found.total


@pytest.mark.gpu
def test_a_runner_on_a_gpu_records_its_steps_and_draws_what_the_cpu_draws(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", hidden_size=96, head_dim=16)
    tokens = []
    for device in ("cpu", "cuda"):
        runner = load_runner(tmp_path, RunnerLimits(max_num_seqs=8), device=device, dtype="float32")
        engine = Engine(runner, SchedulerLimits(8, 512))
        submits = [new_submit(f"s{k}", num_prompt=5 + k, max_tokens=12) for k in range(6)]
        outputs = engine.step([replace(s, sampling=GREEDY) for s in submits])
        while engine.has_work:
            outputs = [*outputs, *engine.step()]
        engine.close()
        drawn = [output for output in outputs if isinstance(output, StepOutput)]
        tokens.append(
            {name: [o.token_id for o in stream] for name, stream in by_sequence(drawn).items()}
        )
    assert tokens[0] == tokens[1]

"""No step of a warm runner launches a kernel for the first time."""

from dataclasses import replace

import pytest
import torch

from bench.dense_shape import DenseShape
from bench.gpu import model
from bench.gpu.scale import SCALES
from kernels.providers import load_ops
from kernels.triton.compilations import compilations
from kernels.triton.scheduled_attention import (
    BLOCK_SEQS,
    attend_configuration,
    merge_configuration,
)
from shared.messages import SamplingParams
from tests.support.models.engine import new_submit
from worker.engine.engine import Engine
from worker.engine.interface import ScheduledBatch
from worker.engine.scheduler import SchedulerLimits
from worker.model.gpu_memory import run_step
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.runner import TorchRunner
from worker.model.warm_up import NUM_SEQS, PROMPT_LENS, warm_steps

ATTENTION = (attend_configuration, merge_configuration)
MAX_SEQ_LEN = 160
"""Several splits of decode attention."""
ONE_HEAD = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
}


def steps(*, max_num_seqs: int = 4, max_num_batched_tokens: int = 128) -> list[ScheduledBatch]:
    found = warm_steps(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_seq_len=MAX_SEQ_LEN,
        block_size=16,
        vocab_size=512,
    )
    return list(found)


def test_a_warm_runner_finds_all_kernels_of_attention() -> None:
    attention = load_ops("triton").paged_attention
    ops = load_ops("reference").replace(paged_attention=attention)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = DenseShape.of(ONE_HEAD)
    decoder = model.decoder(replace(SCALES["tiny"], model=small), ops, device, torch.float32)
    block = BlockShape(
        decoder.num_layers, 16, decoder.num_kv_heads, decoder.head_dim, decoder.dtype
    )
    cache = KVCache.allocate(block, 64, device)
    for configuration in ATTENTION:
        configuration.cache_clear()
    for batch in steps(max_num_batched_tokens=16):
        run_step(decoder, ops, cache, batch)
    warm = [configuration.cache_info().currsize for configuration in ATTENTION]

    runner = TorchRunner(decoder, cache, ops, max_seq_len=MAX_SEQ_LEN, max_num_batched_tokens=128)
    engine = Engine(runner, SchedulerLimits(4, 128))
    drawn = SamplingParams(temperature=1.0, top_p=0.9)
    engine.step([replace(new_submit("long", num_prompt=140, max_tokens=2), sampling=drawn)])
    engine.step([new_submit("short", num_prompt=5, max_tokens=2)])
    while engine.has_work:
        engine.step()
    engine.close()

    assert 0 not in warm
    assert [configuration.cache_info().currsize for configuration in ATTENTION] == warm


@pytest.mark.gpu
@pytest.mark.parametrize("max_num_seqs", [1, 8, 40])
def test_a_started_runner_compiles_nothing_more(max_num_seqs: int) -> None:
    ops = load_ops("triton")
    scale = replace(SCALES["tiny"], max_num_seqs=max_num_seqs, max_num_batched_tokens=256)
    decoder = model.decoder(scale, ops, torch.device("cuda"), torch.bfloat16)
    runner = model.runner(scale, decoder, ops)
    engine = Engine(runner, SchedulerLimits(scale.max_num_seqs, scale.max_num_batched_tokens))
    samplings = [
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.1, logit_bias={3: 1.0}),
        SamplingParams(temperature=0.0, logprobs=2),
    ]
    with compilations() as compiled:
        for k, num_prompt in enumerate((1, 7, 20, 50, 3)):
            submit = new_submit(str(k), num_prompt=num_prompt, max_tokens=5)
            engine.step([replace(submit, sampling=samplings[k % 3])])
        engine.step([new_submit(f"more {k}", num_prompt=4) for k in range(max_num_seqs)])
        while engine.has_work:
            engine.step()
    engine.close()
    assert compiled == []


def test_there_are_steps_for_each_kernel_of_attention() -> None:
    few, many = BLOCK_SEQS
    assert list(NUM_SEQS) == [few, few + 1, many + 1]
    found = steps(max_num_seqs=40, max_num_batched_tokens=512)
    sizes = {(len(batch.sequences), batch.sequences[0].num_tokens) for batch in found}
    assert sizes >= {(num_seqs, length) for num_seqs in (32, 33) for length in (1, 2)}
    assert sizes >= {(32, 16), (33, 15)}


def test_the_steps_edit_and_draw_in_every_way() -> None:
    found = steps(max_num_batched_tokens=512)
    shares = [share for batch in found for share in batch.sequences]
    edits = [share.edits for share in shares if share.edits is not None]
    assert all(all((e.biases, e.penalties, e.banned_ids, e.mask)) for e in edits)
    assert edits
    samplings = [share.sampling for share in shares]
    assert {sampling.temperature for sampling in samplings} == {0.0, 1.0}
    assert {bool(sampling.top_k) for sampling in samplings} == {True, False}
    prompt_lens = {min(prompt_len, MAX_SEQ_LEN) for prompt_len in PROMPT_LENS}
    assert {len(share.token_ids) for share in shares} >= {1, *prompt_lens}
    assert max(len(batch.sequences) for batch in found) == 4


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(1, 1), (1, 8), (2, 3), (8, 512)])
def test_no_step_exceeds_the_limits(num_seqs: int, num_tokens: int) -> None:
    found = steps(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
    assert found
    assert max(len(batch.sequences) for batch in found) <= num_seqs
    assert max(batch.num_tokens for batch in found) <= num_tokens
    assert max(s.start + s.num_tokens for batch in found for s in batch.sequences) <= MAX_SEQ_LEN

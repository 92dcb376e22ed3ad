"""The number of blocks of the cache."""

from pathlib import Path

import pytest
import torch

from shared.errors import StartupError
from tests.support.models.batches import batch, share
from tests.support.models.numerics import assert_close
from tests.support.models.tiny import reference_logits
from tests.worker.model.conftest import TinyModels
from worker.model.inputs import build_inputs
from worker.model.kv_cache import (
    BlockShape,
    KVCache,
    cpu_bytes,
    num_blocks_for,
)
from worker.model.loading import load_decoder
from worker.model.start import whole_cache

CPU = torch.device("cpu")
BLOCK = BlockShape(num_layers=2, block_size=16, num_kv_heads=3, head_dim=8, dtype=torch.bfloat16)


def blocks_for(
    *,
    kv_cache_bytes: int | None = None,
    free_bytes: int = 1 << 40,
    max_num_blocks: int = 1 << 20,
) -> int:
    return num_blocks_for(
        BLOCK,
        kv_cache_bytes=kv_cache_bytes,
        free_bytes=free_bytes,
        max_num_blocks=max_num_blocks,
    )


def test_a_block_takes_what_its_tensors_take() -> None:
    cache = KVCache.allocate(BLOCK, 5, CPU)
    assert cache.keys.nbytes + cache.values.nbytes == 5 * BLOCK.num_bytes
    assert (cache.num_blocks, cache.block_size) == (5, 16)


def test_the_given_bytes_are_filled_and_not_exceeded() -> None:
    for given, expected in ((7 * BLOCK.num_bytes, 7), (8 * BLOCK.num_bytes - 1, 7)):
        assert blocks_for(kv_cache_bytes=given) == expected


def test_without_a_size_it_takes_no_more_than_all_sequences_fill() -> None:
    assert blocks_for(max_num_blocks=9) == 9


def test_without_a_size_it_takes_no_more_than_what_is_left() -> None:
    assert blocks_for(free_bytes=5 * BLOCK.num_bytes) == 5


def test_the_cpu_gives_a_share_of_the_memory() -> None:
    meminfo = Path("/proc/meminfo").read_text().split()
    total_bytes = int(meminfo[meminfo.index("MemTotal:") + 1]) * 1024
    assert 0 < cpu_bytes() < total_bytes / 2


def test_a_cache_without_a_block_is_refused() -> None:
    needed = f"needs {BLOCK.num_bytes:,} bytes for its first 16 tokens, but"
    with pytest.raises(StartupError, match=f"{needed} has 10: raise --kv-cache-bytes"):
        blocks_for(kv_cache_bytes=10)
    with pytest.raises(StartupError, match=f"{needed} 10 bytes of memory are left"):
        blocks_for(free_bytes=10)


def test_a_cache_that_no_memory_holds_stops_the_start() -> None:
    with pytest.raises(StartupError, match="no memory for a KV cache"):
        KVCache.allocate(BLOCK, 1 << 40, CPU)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_cache_outside_an_engine_holds_latent_vectors_once(
    tiny_models: TinyModels, kernels: str
) -> None:
    directory, model = tiny_models("deepseek_v3")
    decoder = load_decoder(directory, dtype="float32", device=CPU, kernels=kernels)
    prompt = list(range(1, 20))

    cache = whole_cache(decoder, 8, 3)
    inputs = build_inputs(batch(share(prompt, [2, 0, 1])), 8, CPU).forward
    with torch.inference_mode():
        logits = decoder.forward(inputs, cache)

    assert cache.tensors == (cache.keys,)
    assert_close(logits[0], reference_logits(model, prompt)[-1], 1e-4)


def test_a_cache_outside_an_engine_has_no_states(tiny_models: TinyModels) -> None:
    directory, _ = tiny_models("lfm2")
    decoder = load_decoder(directory, dtype="float32", device=CPU, kernels="reference")

    with pytest.raises(StartupError, match="keeps recurrent states"):
        whole_cache(decoder, 8, 3)

"""A cache whose keys and values are rounded to 8 bits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.native.paged_attention import attend
from kernels.reference.store_kv import FLOAT8_MAX, to_float8
from shared.errors import StartupError
from tests.support.models.batches import batch, share
from tests.support.models.native import variants
from tests.support.models.numerics import assert_close
from tests.support.models.tiny import write_tiny_model
from tests.worker.model.decoders.test_native_families import PROMPTS, STEPS, stepwise_logits
from worker.model.forward import Decoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import KVCache
from worker.model.loading import load_decoder
from worker.model.numerics import kv_dtype_of, numerics_of
from worker.model.start import whole_cache

FLOAT8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
FAMILIES = ["llama", "deepseek_v3", "gemma3_text", "qwen3_5_text"]
"""Full attention, latent vectors, windows, and states beside keys and values."""
TOLERANCE = 1e-4


def load(directory: Path, kernels: str = "native", kv_dtype: str = "float8") -> Decoder:
    return load_decoder(
        directory, dtype="float32", kv_dtype=kv_dtype, device=CPU, kernels=kernels, num_threads=1
    )


def every_number() -> Tensor:
    """All numbers of 8 bits, in an order that mixes sizes, [16, 16]."""
    codes = (torch.arange(256) * 37 % 256).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    return codes.view(FLOAT8).view(16, 16)


def filled(decoder: Decoder) -> KVCache:
    """The cache after a prompt."""
    cache = whole_cache(decoder, 8, 10)
    for tensor in cache.tensors:
        tensor.view(torch.uint8).zero_()
    inputs = build_inputs(batch(share(PROMPTS[0], list(range(6)))), 8, CPU, cache.layout).forward
    with torch.inference_mode():
        decoder.forward(inputs, cache)
    return cache


def test_attention_reads_every_number_as_it_is() -> None:
    """In all variants, for one token and for a prompt, which have readers of their own."""
    rows = every_number().view(16, 1, 16)
    stored = torch.stack([rows.roll(k, 0) for k in range(3)]).view(6, 8, 1, 16)
    for num_tokens in (1, 20):
        query = torch.randn(num_tokens, 2, 16) / 1000
        tables = torch.arange(6, dtype=torch.int32).view(1, 6)
        lens = torch.tensor([[0, num_tokens], [45, 0]], dtype=torch.int32)
        found = [
            attend(
                library,
                query,
                cache,
                cache,
                tables,
                lens[0].contiguous(),
                lens[1, :1].contiguous(),
                spec=AttentionSpec(scale=0.3),
            )
            for library in variants().values()
            for cache in (stored, stored.float())
        ]
        assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("factor", [2.0**-14, 1.0, 1e4], ids=["tiny", "usual", "huge"])
def test_a_step_stores_the_nearest_numbers(factor: float, tmp_path: Path) -> None:
    """Of the first layer, whose inputs do not depend on the cache."""
    write_tiny_model(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"] *= factor
    save_file(tensors, tmp_path / "model.safetensors")

    stored, exact = filled(load(tmp_path)), filled(load(tmp_path, kv_dtype="auto"))

    for rounded, numbers in zip(stored.tensors, exact.tensors, strict=True):
        assert rounded.dtype == FLOAT8
        expected = to_float8(numbers[0])
        assert torch.equal(rounded[0].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_those_of_the_reference(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family)

    native, reference, exact = (
        stepwise_logits(decoder, STEPS)
        for decoder in (
            load(tmp_path),
            load(tmp_path, "reference"),
            load(tmp_path, kv_dtype="auto"),
        )
    )

    for fast, right, unrounded in zip(native, reference, exact, strict=True):
        # A number between two others is rounded either way if its last bit differs.
        assert (fast - right).norm() < 0.2 * (fast - unrounded).norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_do_not_depend_on_the_step(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family)
    decoder = load(tmp_path)

    mixed = stepwise_logits(decoder, STEPS)
    at_once = stepwise_logits(decoder, [(0, 26), (43, 0)])

    assert all(torch.equal(one, other) for one, other in zip(mixed, at_once, strict=True))


def test_a_model_of_transformers_has_such_a_cache(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "phi")
    native, reference = (
        stepwise_logits(load(tmp_path, kernels), STEPS) for kernels in ("native", "reference")
    )

    for fast, right in zip(native, reference, strict=True):
        assert_close(fast, right, TOLERANCE)


def test_numerics_name_the_rounding(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")

    names = [
        numerics_of(load(tmp_path, kv_dtype=kv_dtype), is_batch_invariant=False)
        for kv_dtype in ("auto", "float8")
    ]

    assert names == ["cpu fused float32", "cpu fused float32 kv-float8"]
    assert [kv_dtype_of(name) for name in names] == ["auto", "float8"]


def test_a_block_takes_half_of_the_memory(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    sizes = [
        whole_cache(
            load_decoder(tmp_path, dtype="bfloat16", kv_dtype=kv_dtype, device=CPU), 16, 4
        ).num_bytes
        for kv_dtype in ("auto", "float8")
    ]

    assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize(
    ("kv_dtype", "device", "message"),
    [
        ("float4", "cpu", "kv_dtype 'float4' is not one of auto, float8"),
        ("float8", "cuda", "kv_dtype float8 is for the CPU, not for cuda"),
    ],
)
def test_other_caches_are_refused(kv_dtype: str, device: str, message: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    with pytest.raises(StartupError, match=message):
        load_decoder(tmp_path, kv_dtype=kv_dtype, device=torch.device(device))


def test_the_largest_number_is_kept() -> None:
    assert to_float8(torch.tensor([1e9, -1e9])).float().tolist() == [FLOAT8_MAX, -FLOAT8_MAX]

"""Fused rotation and storage, against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.reference import rope_store_kv as reference
from kernels.triton.rope_store_kv import rope_store_kv
from kernels.triton.store_kv import store_kv
from tests.support.models.numerics import assert_close, poisoned

Fused = Callable[..., Tensor]

MAX_RELATIVE_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
POSITIONS = [0, 11, 3, 3, 62]
SLOTS = [14, -1, 0, 4, -7]
"""Two of the tokens are padding."""
NUM_BLOCKS, BLOCK_SIZE = 5, 3


OPS: dict[str, Fused] = {
    "reference": reference.rope_store_kv,
    "triton": rope_store_kv,
}
SHAPES = [(6, 2, 16), (3, 3, 10), (5, 1, 80)]


def check(op: Fused, device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim = shape
    torch.manual_seed(3)
    fused = torch.randn(len(POSITIONS), num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = torch.rand(63, head_dim // 2, dtype=torch.float64) * 100
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    caches = [
        poisoned(NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim, dtype=dtype).to(device)
        for _ in range(2)
    ]
    parts = torch.split(fused.to(device), [num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected, expected_key = (
        torch.stack([turned(heads, angles[p]) for heads, p in zip(part, POSITIONS, strict=True)])
        for part in (fused[:, :num_heads], fused[:, num_heads : num_heads + num_kv_heads])
    )

    query = op(
        *parts,
        torch.tensor(POSITIONS, device=device),
        table.to(device),
        *caches,
        torch.tensor(SLOTS, device=device),
    )

    stored = [token for token, slot in enumerate(SLOTS) if slot >= 0]
    keys, values = (cache.flatten(0, 1).cpu() for cache in caches)
    slots = [SLOTS[token] for token in stored]
    assert_close(query.cpu(), expected, MAX_RELATIVE_ERROR[dtype])
    assert_close(keys[slots], expected_key[stored], MAX_RELATIVE_ERROR[dtype])
    assert torch.equal(values[slots], fused[stored, -num_kv_heads:])
    for cache in (keys, values):
        assert int(cache.isnan().sum()) == cache.numel() - cache[slots].numel()


def turned(heads: Tensor, angles: Tensor) -> Tensor:
    """Each pair of elements as a complex number, rotated by its angle."""
    first, second = heads.double().chunk(2, dim=-1)
    rotated = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((rotated.real, rotated.imag), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_turns_and_stores(
    device: torch.device, name: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check(OPS[name], device, shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (32, 8, 128)], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_turns_and_stores_bfloat16_on_a_gpu(
    device: torch.device, name: str, shape: tuple[int, int, int]
) -> None:
    check(OPS[name], device, shape, torch.bfloat16)


FAULTS: dict[str, Callable[[Fused], Fused]] = {
    "another position": lambda op: lambda q, k, v, p, *rest: op(q, k, v, p + p.eq(3), *rest),
    "another slot": lambda op: lambda *given: op(*given[:-1], given[-1] + given[-1].eq(4)),
    "padding is stored": lambda op: lambda *given: op(*given[:-1], given[-1].abs()),
    "keys for values": lambda op: lambda q, k, v, *rest: op(q, k, k, *rest),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OPS)
def test_a_planted_fault_is_caught(device: torch.device, name: str, fault: str) -> None:
    with pytest.raises(AssertionError):
        check(FAULTS[fault](OPS[name]), device, SHAPES[0], torch.float32)


@pytest.mark.parametrize("name", OPS)
def test_no_tokens_are_none(device: torch.device, name: str) -> None:
    heads, index = torch.ones(0, 2, 16, device=device), torch.ones(0, device=device).long()
    cache = poisoned(1, 4, 2, 16).to(device)
    table = torch.ones(3, 16, device=device)
    assert OPS[name](heads, heads, heads, index, table, cache, cache, index).shape == (0, 2, 16)


def test_what_the_kernels_cannot_read_is_refused() -> None:
    heads, cache = torch.ones(2, 4, 16), torch.ones(1, 4, 4, 16)
    index, table = torch.tensor([0, 1]), torch.ones(3, 16)
    apart = torch.ones(2, 16, 4).transpose(1, 2)
    with pytest.raises(ValueError, match=r"value has strides \(64, 1, 4\), expected \(\*, 16, 1\)"):
        store_kv(heads, apart, cache, cache, index)
    with pytest.raises(ValueError, match=r"value_cache of torch\.float16, expected one dtype"):
        store_kv(heads, heads, cache, cache.half(), index)
    with pytest.raises(ValueError, match="6 query heads are not a multiple of 4 key heads"):
        rope_store_kv(torch.ones(2, 6, 16), heads, heads, index, table, cache, cache, index)
    with pytest.raises(ValueError, match="rope_table has strides"):
        rope_store_kv(heads, heads, heads, index, table.mT.contiguous().mT, cache, cache, index)

"""Causal attention of packed queries over a paged KV cache."""

from collections import defaultdict

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention_spec import AttentionSpec
from kernels.shapes import check_shape

_MIN_PADDED_LEN = 64


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    num_decodes: int,
    max_query_len: int,
    spec: AttentionSpec,
) -> Tensor:
    """Attend from each token to its sequence as ``spec`` says; returns ``query``'s shape, or with
    a ``value_dim`` [num_tokens, num_heads, value_dim].

    ``query`` is [num_tokens, num_heads, head_dim]; its rows ``query_starts[s]`` .. ``query_starts[s
    + 1] - 1`` are the last tokens of sequence s, whose whole context of ``context_lens[s]`` tokens,
    including these, is in the cache already. The caches are contiguous [num_blocks, block_size,
    num_kv_heads, head_dim] of ``query``'s dtype or of float8_e4m3fn; token t of sequence s is in
    slot t % block_size of block ``block_tables[s, t // block_size]``. num_heads is a multiple of
    num_kv_heads, and adjacent query heads share a key head. The index tensors are int32:
    ``block_tables`` [num_seqs, max_num_blocks], ``query_starts`` [num_seqs + 1], ``context_lens``
    [num_seqs].

    The first ``num_decodes`` sequences have one token each, no sequence has more than
    ``max_query_len``. Slots that belong to no token of the batch are never read: they may contain
    NaN. A decode with a context of 0 tokens, which only pads a batch to the size of a CUDA graph,
    returns zeros. Raises `ValueError` if shapes do not match.

    This provider reads the lengths on the host, which synchronizes with the device. Up to rounding,
    a sequence's result does not depend on what else is in the batch.
    """
    check_attention(query, key_cache, value_cache, block_tables, query_starts, context_lens)
    cache = _PagedCache(key_cache, value_cache, block_tables, query.dtype, spec.value_dim)
    lens = context_lens.tolist()
    starts = query_starts.tolist()
    out = query.new_zeros(*query.shape[:2], spec.value_dim or query.shape[2])
    for padded_len, rows in _by_padded_len(lens[:num_decodes], spec).items():
        index = torch.tensor(rows, device=query.device)
        out[index] = _decode(query[index], cache, index, context_lens[index], padded_len, spec)
    for row in range(num_decodes, len(lens)):
        chunk = slice(starts[row], starts[row + 1])
        out[chunk] = _prefill(query[chunk], cache, row, lens[row], spec)
    return out


class _PagedCache:
    """Gathers tokens' keys and values from their blocks."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        block_tables: Tensor,
        dtype: torch.dtype,
        value_dim: int | None,
    ) -> None:
        self._dtype = dtype
        self._keys = keys.view(-1, *keys.shape[2:])
        self._values = values.view(-1, *values.shape[2:])
        self._block_size = keys.shape[1]
        self._block_tables = block_tables
        self._value_dim = value_dim

    def gather(self, rows: Tensor | slice, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the tokens at ``positions`` of the sequences ``rows``.

        ``positions`` is [num_rows, length] int64; the results are [num_rows, num_kv_heads, length,
        head_dim].
        """
        blocks = self._block_tables[rows].gather(1, positions // self._block_size)
        slots = (blocks * self._block_size + positions % self._block_size).flatten()
        shape = (*positions.shape, *self._keys.shape[1:])
        keys, values = (
            self._rows(cache, slots).view(shape) for cache in (self._keys, self._values)
        )
        return keys.transpose(1, 2), values[..., : self._value_dim].transpose(1, 2)

    def _rows(self, cache: Tensor, slots: Tensor) -> Tensor:
        if cache.dtype != torch.float8_e4m3fn:
            return cache.index_select(0, slots)
        rows = cache.view(torch.uint8).index_select(0, slots).view(cache.dtype)
        return rows.to(self._dtype)


def _by_padded_len(lens: list[int], spec: AttentionSpec) -> dict[int, list[int]]:
    """Group sequences by padded length, which is less than a quarter or 64 tokens longer than their
    own.

    The padded length, and with it the order of summation, depends on the sequence alone. Sequences
    without tokens are omitted.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for row, context_len in enumerate(lens):
        if not context_len:
            continue
        visible = context_len - spec.first_visible(context_len - 1)
        step = max(_MIN_PADDED_LEN, (1 << (visible - 1).bit_length()) // 8)
        groups[-(-visible // step) * step].append(row)
    return groups


def _decode(
    query: Tensor,
    cache: _PagedCache,
    rows: Tensor,
    context_lens: Tensor,
    padded_len: int,
    spec: AttentionSpec,
) -> Tensor:
    """Attention of the single token of each sequence in ``rows``, all padded to ``padded_len``."""
    lens = context_lens.long().unsqueeze(1)
    positions = _first_visible(lens - 1, spec) + torch.arange(padded_len, device=query.device)
    is_visible = positions < lens
    # Padding repeats the sequence's own last token, because a mask does not hide NaN in other
    # slots.
    keys, values = cache.gather(rows, positions.minimum(lens - 1))
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    # Query heads that share keys take the place of a prompt's tokens, so that no key is repeated.
    shared = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = is_visible[:, None, None, :].expand(*shared.shape[:3], padded_len)
    sinks, slopes = (
        None if of_heads is None else of_heads.view(1, num_kv_heads, -1, 1)
        for of_heads in (spec.sinks, spec.slopes)
    )
    biases = None if slopes is None else slopes * (positions - (lens - 1))[:, None, None, :]
    out = _attend(shared, keys, values, mask, biases, sinks, spec)
    return out.reshape(num_rows, num_heads, -1)


def _prefill(
    query: Tensor,
    cache: _PagedCache,
    row: int,
    context_len: int,
    spec: AttentionSpec,
) -> Tensor:
    """Attention of the last tokens of a sequence."""
    num_tokens = query.shape[0]
    start = context_len - num_tokens
    positions = torch.arange(spec.first_visible(start), context_len, device=query.device)
    keys, values = cache.gather(slice(row, row + 1), positions.unsqueeze(0))
    queries = torch.arange(start, context_len, device=query.device).unsqueeze(1)
    is_visible = (positions <= queries) & (positions >= _first_visible(queries, spec))
    sinks, slopes = (
        None if of_heads is None else of_heads.view(1, -1, 1, 1)
        for of_heads in (spec.sinks, spec.slopes)
    )
    biases = None if slopes is None else slopes * (positions - queries)
    heads = query.transpose(0, 1).unsqueeze(0)
    out = _attend(heads, keys, values, is_visible, biases, sinks, spec)
    return out.squeeze(0).transpose(0, 1)


def _first_visible(positions: Tensor, spec: AttentionSpec) -> Tensor:
    """`AttentionSpec.first_visible` of many tokens."""
    first = torch.zeros_like(positions)
    if spec.window is not None:
        first = (positions + 1 - spec.window).clamp(min=0)
    return first if spec.chunk is None else first.maximum(positions // spec.chunk * spec.chunk)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    is_visible: Tensor,
    biases: Tensor | None,
    sinks: Tensor | None,
    spec: AttentionSpec,
) -> Tensor:
    """[rows, heads, length, head_dim]; ``keys`` and ``values`` may have fewer heads. ``biases`` are
    added to the scores."""
    if spec.softcap is None and biases is None and sinks is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=is_visible, scale=spec.scale, enable_gqa=True
        )
    groups = query.shape[1] // keys.shape[1]
    keys, values = (tensor.float().repeat_interleave(groups, dim=1) for tensor in (keys, values))
    scores = query.float() @ keys.transpose(2, 3) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if biases is not None:
        scores = scores + biases
    scores = scores.masked_fill(~is_visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return (weights @ values).to(query.dtype)


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
) -> None:
    _, num_heads, head_dim = query.shape
    check_shape("key_cache", key_cache, (None, None, None, head_dim))
    check_shape("value_cache", value_cache, key_cache.shape)
    num_kv_heads = key_cache.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} key heads")
    num_seqs = context_lens.shape[0]
    check_shape("block_tables", block_tables, (num_seqs, None))
    check_shape("query_starts", query_starts, (num_seqs + 1,))

"""Rotary position embedding (Su et al., arXiv:2104.09864), rotating the halves of each head."""

from torch import Tensor, cat

from kernels.shapes import check_shape


def rope(
    query: Tensor, key: Tensor, positions: Tensor, rope_table: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate each head by the angles of its token's position.

    ``query`` is [num_tokens, num_heads, head_dim], ``key`` is [num_tokens, num_kv_heads, head_dim],
    ``positions`` is [num_tokens] int64. ``rope_table`` is [max_positions, head_dim] float32: the
    cosines of the head_dim / 2 angles, then their sines. Element i is rotated with element i +
    head_dim / 2. Computed in float32; a provider may overwrite ``query`` and ``key``: use only the
    returned tensors. Raises `ValueError` if shapes do not match.
    """
    check_rotation(query, key, positions, rope_table)
    cosines, sines = rope_table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cosines, sines), _rotate(key, cosines, sines)


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.float().chunk(2, dim=-1)
    rotated = cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return rotated.to(heads.dtype)


def check_rotation(query: Tensor, key: Tensor, positions: Tensor, rope_table: Tensor) -> None:
    """Raise `ValueError` if shapes do not match."""
    num_tokens, _, head_dim = query.shape
    check_shape("key", key, (num_tokens, None, head_dim))
    check_shape("positions", positions, (num_tokens,))
    check_shape("rope_table", rope_table, (None, head_dim))

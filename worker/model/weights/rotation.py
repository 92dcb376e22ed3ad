"""The order of a head's elements, in which rotary positions rotate the two halves of the head.

Families rotate adjacent elements, or only the first elements of a head. Exchanging outputs of the
products with queries and keys, in both alike, leaves the attention as it is, so that no kernel has
to know.
"""

import torch
from torch import Tensor

from worker.model.spec import Rope


def rotated_order(rope: Rope, head_dim: int) -> Tensor | None:
    """The stored place of each element, [head_dim] int64; None if nothing moves.

    Element i is rotated with element i + head_dim / 2, for the first rope.dim / 2 elements i.
    """
    places = torch.arange(head_dim)
    rotated, plain = places[: rope.dim], places[rope.dim :]
    if rope.is_interleaved:
        rotated = torch.cat((rotated[::2], rotated[1::2]))
    num_plain = len(plain) // 2
    first, second = rotated.chunk(2)
    order = torch.cat((first, plain[:num_plain], second, plain[num_plain:]))
    return None if torch.equal(order, places) else order

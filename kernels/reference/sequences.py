"""The order in which recurrences take the tokens of a step."""

from collections.abc import Iterator

from torch import Tensor, nonzero


def by_token(query_starts: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For the first token of every sequence of a step, then for the second, and so on: the
    sequences that have one, and the tokens' places in the step.

    Sequence s has the tokens ``query_starts[s]`` to ``query_starts[s + 1]``, ``query_starts``
    [num_seqs + 1] int32.
    """
    starts, lens = query_starts[:-1].long(), query_starts.diff().long()
    for k in range(int(lens.max())):
        sequences = nonzero(lens > k).squeeze(1)
        yield sequences, starts[sequences] + k

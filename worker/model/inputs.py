"""Converts a scheduled batch into the tensors of a step, on the host."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.interface import ScheduledBatch, ScheduledSequence
from worker.model.cache_layout import CacheLayout, one_group
from worker.model.forward import ForwardInputs
from worker.model.sampling.logits_processor import EditInputs, edit_arrays
from worker.model.sampling.row_scores import ScoreInputs, ScorePlan
from worker.model.sampling.sampler import SamplingInputs, uniform
from worker.model.sampling.stated_tokens import StatedInputs, stated_arrays
from worker.model.transfer import Packed

_Arrays: TypeAlias = dict[str, NDArray[Any]]
_Inputs = TypeVar("_Inputs", SamplingInputs, EditInputs, ScoreInputs, StatedInputs)

_NAMES: Mapping[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (SamplingInputs, EditInputs, ScoreInputs, StatedInputs)
}
NO_SLOT = -1
"""The slot of a token whose key and value are not written."""
BY_GROUP = ("slots", "block_tables")
"""The tensors with a row, or a table, for each group of layers."""
_OTHERS = ("carried_tokens", "carried_rows", "continued_tokens", "continued_ids")
_ALIGNMENT = 16
_ONE_LAYER = one_group(1)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All inputs of a step, on the device."""

    forward: ForwardInputs
    """If ``HostStep.graph_size`` is set, padded to that many sequences."""
    sampling: SamplingInputs | None
    """None if all rows are greedy."""
    edits: EditInputs | None
    """None if no logits are edited."""
    scores: ScoreInputs | None
    """None if no logprobs are requested."""
    stated: StatedInputs | None
    """None if no tokens are judged."""
    carried_tokens: Tensor
    """[num_carried] int64: positions in ``forward.token_ids`` of tokens that the last step drew."""
    carried_rows: Tensor
    """[num_carried] int64: their rows in the last step's result."""
    continued_tokens: Tensor
    """[num_continued] int64: positions in ``forward.token_ids`` of the last tokens of sequences
    that draw nothing."""
    continued_ids: Tensor
    """[num_continued] int64: the tokens that follow them."""


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step, laid out on the host."""

    packed: Packed
    num_decodes: int
    max_query_len: int
    num_sampled: int
    num_previous: int
    """The number of rows that the last step's result must have."""
    score_plan: ScorePlan
    graph_size: int | None = None
    """The number of sequences that it was padded to; None if it was not padded."""
    predicted_rows: Sequence[range] = ()
    """The rows of each sequence for which a token is predicted."""

    def send(self) -> StepInputs:
        """Copy the step to the device in a single asynchronous transfer."""
        tensors = self.packed.send()
        sampling = _taken(SamplingInputs, tensors)
        edits = _taken(EditInputs, tensors)
        scores = _taken(ScoreInputs, tensors)
        stated = _taken(StatedInputs, tensors)
        others = [tensors.pop(name) for name in _OTHERS]
        tensors["slots"] = tensors["slots"][:, : len(tensors["token_ids"])]
        forward = ForwardInputs(
            **tensors, num_decodes=self.num_decodes, max_query_len=self.max_query_len
        )
        return StepInputs(forward, sampling, edits, scores, stated, *others)


def _taken(kind: type[_Inputs], tensors: dict[str, Tensor]) -> _Inputs | None:
    """A group of tensors, if the step has it."""
    names = _NAMES[kind]
    return kind(**{name: tensors.pop(name) for name in names}) if names[0] in tensors else None


def lay_out(
    batch: ScheduledBatch,
    block_size: int,
    device: torch.device,
    graph_size: Callable[[int], int | None] = lambda num_seqs: None,
    layout: CacheLayout = _ONE_LAYER,
) -> HostStep:
    """Lay out a batch for ``device``, single tokens first.

    ``layout`` is the layout of the cache. If every sequence has a single token and is sampled,
    ``graph_size`` gives the number of sequences that the step is padded to, with sequences of one
    token without slot or context. Raises `ValueError` if the batch is empty, or a sequence has no
    tokens or too few blocks.
    """
    if not batch.sequences:
        raise ValueError("a batch without sequences")
    lens = [sequence.num_tokens for sequence in batch.sequences]
    for sequence, num_tokens in zip(batch.sequences, lens, strict=True):
        _check(sequence, num_tokens, block_size, layout)
    num_decodes = lens.count(1)
    packed = batch.sequences
    if num_decodes < len(lens):
        packed = sorted(batch.sequences, key=lambda sequence: sequence.num_tokens > 1)
        lens = [1] * num_decodes + [sequence.num_tokens for sequence in packed[num_decodes:]]
    query_lens = np.array(lens)
    sampled = _rows(batch.sequences)
    scored = [sequence for sequence in batch.sequences if sequence.scored_ids]
    is_decode = num_decodes == len(sampled) == len(packed) and not scored
    size = graph_size(num_decodes) if is_decode else None
    tokens = _token_arrays(packed, query_lens, block_size, layout)
    if size is not None:
        tokens = _padded(tokens, size)
    tokens |= {name: _aligned(tokens[name]) for name in BY_GROUP}
    rows = _row_arrays(batch.sequences, query_lens, num_decodes)
    plan = ScorePlan(sampled, scored)
    draws = _sampling_arrays(sampled) | edit_arrays(sampled) | plan.arrays()
    draws |= stated_arrays(batch.sequences)
    return HostStep(
        packed=Packed(tokens | rows | draws, device),
        num_decodes=size or num_decodes,
        max_query_len=int(query_lens.max()),
        num_sampled=len(sampled),
        num_previous=int(rows["carried_rows"].max(initial=-1)) + 1,
        score_plan=plan,
        graph_size=size,
        predicted_rows=_predicted_rows(batch.sequences),
    )


def build_inputs(
    batch: ScheduledBatch,
    block_size: int,
    device: torch.device,
    layout: CacheLayout = _ONE_LAYER,
) -> StepInputs:
    """Lay out a batch and copy it to ``device``. Raises like `lay_out`."""
    return lay_out(batch, block_size, device, layout=layout).send()


def _rows(sequences: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """The sequence of each row of the result, at the position that the row draws."""
    sampled = [sequence for sequence in sequences if sequence.is_sampled]
    if not any(sequence.num_drafts for sequence in sampled):
        return sampled
    return [_row(sequence, k) for sequence in sampled for k in range(1 + sequence.num_drafts)]


def _predicted_rows(sequences: Sequence[ScheduledSequence]) -> list[range]:
    """See `HostStep.predicted_rows`."""
    if not any(sequence.is_predicted for sequence in sequences):
        return []
    sampled = [sequence for sequence in sequences if sequence.is_sampled]
    ends = accumulate(1 + sequence.num_drafts for sequence in sampled)
    return [
        range(end - 1 - sequence.num_drafts, end)
        for sequence, end in zip(sampled, ends, strict=True)
        if sequence.is_predicted
    ]


def _row(sequence: ScheduledSequence, k: int) -> ScheduledSequence:
    if not k:
        return sequence
    edits = sequence.draft_edits[k - 1] if sequence.draft_edits else None
    return structs.replace(sequence, position=sequence.position + k, edits=edits)


def _check(
    sequence: ScheduledSequence, num_tokens: int, block_size: int, layout: CacheLayout
) -> None:
    end, tables = sequence.start + num_tokens, sequence.block_tables
    if len(tables) != len(layout.groups):
        raise ValueError(f"{len(tables)} block tables for {len(layout.groups)} groups")
    if layout.state is not None:
        *tables, states = tables
        expected = layout.state.num_blocks * (2 if sequence.start else 1)
        if len(states) != expected:
            raise ValueError(f"{len(states)} blocks of states, expected {expected}")
    # States alone need no blocks for tokens.
    num_blocks = min(map(len, tables), default=-(-end // block_size))
    if not num_tokens or num_blocks * block_size < end:
        raise ValueError(
            f"{num_tokens} tokens up to position {end} in {num_blocks} blocks of {block_size}"
        )


def _token_arrays(
    packed: Sequence[ScheduledSequence],
    query_lens: NDArray[Any],
    block_size: int,
    layout: CacheLayout,
) -> _Arrays:
    """The arrays with an entry for each token, and the arrays that locate each sequence's
    context."""
    query_starts = np.concatenate(([0], query_lens.cumsum()))
    starts = np.array([sequence.start for sequence in packed])
    context_lens = starts + query_lens
    num_blocks = -(-context_lens // block_size)
    states = layout.state
    num_columns = max(num_blocks.max(), 0 if states is None else 2 * states.num_blocks)
    is_used = np.arange(num_columns) < num_blocks[:, None]
    lens = num_blocks.tolist()
    num_groups = len(layout.groups) - (states is not None)
    block_tables = np.zeros((len(layout.groups), *is_used.shape), np.int32)
    for group, factor in enumerate(layout.key_blocks[:num_groups]):
        tables = (s.block_tables[group][:length] for s, length in zip(packed, lens, strict=True))
        # All rows are assigned at once: separate assignments took most of the time of laying out a
        # large step. A block that was released is not read.
        block_tables[group][is_used] = np.maximum(_flat(tables, np.int32), 0) * factor
    owner = np.arange(len(packed)).repeat(query_lens)
    positions = np.arange(query_starts[-1]) - query_starts[owner] + starts[owner]
    blocks = block_tables[:, owner, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    if states is not None:
        slots[-1] = NO_SLOT
        for row, sequence in enumerate(packed):
            table = sequence.block_tables[-1]
            end = 2 * states.num_blocks
            block_tables[-1, row, end - len(table) : end] = table
    return {
        "token_ids": _flat((s.token_ids for s in packed), np.int64),
        "positions": positions,
        "slots": slots,
        "query_starts": query_starts.astype(np.int32),
        "context_lens": context_lens.astype(np.int32),
        "block_tables": block_tables,
    }


def aligned_len(length: int, element_bytes: int, num_groups: int) -> int:
    """The length of a row in memory that is followed by the rows of other groups.

    All begin at a multiple of 16 bytes, because Triton compiles again for any other address.
    """
    if num_groups == 1:
        return length
    num_elements = _ALIGNMENT // element_bytes
    return -(-length // num_elements) * num_elements


def _aligned(array: NDArray[Any]) -> NDArray[Any]:
    length = array.shape[-1]
    missing = aligned_len(length, array.itemsize, len(array)) - length
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)]) if missing else array


def _flat(rows: Iterable[Sequence[int]], dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """The integers of all rows in a single array."""
    return np.fromiter(chain.from_iterable(rows), dtype)


def _padded(decodes: _Arrays, size: int) -> _Arrays:
    """The arrays of single-token sequences, padded to ``size`` sequences."""
    missing = size - len(decodes["token_ids"])
    by_token = {"token_ids": 0, "positions": 0, "context_lens": 0}
    padded = {
        name: np.pad(decodes[name], (0, missing), constant_values=value)
        for name, value in by_token.items()
    }
    return padded | {
        "query_starts": np.arange(size + 1, dtype=np.int32),
        "slots": np.pad(decodes["slots"], ((0, 0), (0, missing)), constant_values=NO_SLOT),
        "block_tables": np.pad(decodes["block_tables"], ((0, 0), (0, missing), (0, 0))),
    }


def _row_arrays(
    sequences: Sequence[ScheduledSequence], query_lens: NDArray[Any], num_decodes: int
) -> _Arrays:
    """The tokens to sample, followed by the tokens that score the next prompt token, in the batch's
    order, and the positions of tokens that are still in flight."""
    is_chunk = np.array([sequence.num_tokens > 1 for sequence in sequences])
    place = np.where(is_chunk, num_decodes + is_chunk.cumsum(), (~is_chunk).cumsum()) - 1
    last_token = query_lens.cumsum()[place] - 1
    carried = [i for i, s in enumerate(sequences) if s.previous_row is not None]
    continued = [i for i, s in enumerate(sequences) if s.next_id is not None]
    scoring = [
        last_token[i] + 1 - s.num_tokens + s.scored_start - s.start + np.arange(len(s.scored_ids))
        for i, s in enumerate(sequences)
        if s.scored_ids
    ]
    num_drafts = np.array([sequence.num_drafts for sequence in sequences])
    first_drawn = last_token - num_drafts
    is_sampled = [s.is_sampled for s in sequences]
    sampled = first_drawn[is_sampled]
    if num_drafts.any():
        num_rows = 1 + num_drafts[is_sampled]
        sampled = np.arange(num_rows.sum()) + (sampled - num_rows.cumsum() + num_rows).repeat(
            num_rows
        )
    return {
        "sampled_rows": np.concatenate([sampled, *scoring]),
        "carried_tokens": first_drawn[np.array(carried, np.int64)],
        "carried_rows": np.array([sequences[i].previous_row for i in carried], np.int64),
        "continued_tokens": last_token[np.array(continued, np.int64)],
        "continued_ids": np.array([sequences[i].next_id for i in continued], np.int64),
    }


def _sampling_arrays(sampled: Sequence[ScheduledSequence]) -> _Arrays:
    """Empty if all rows are greedy."""
    if all(sequence.sampling.temperature == 0 for sequence in sampled):
        return {}
    params = [sequence.sampling for sequence in sampled]
    is_filtered = [
        p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params
    ]
    uniforms = [uniform(s.seed, s.sequence_id.choice, s.position) for s in sampled]
    return {
        "temperatures": np.array([p.temperature for p in params], np.float32),
        "top_ks": np.array([p.top_k for p in params], np.int64),
        "top_ps": np.array([p.top_p for p in params], np.float32),
        "min_ps": np.array([p.min_p for p in params], np.float32),
        "uniforms": np.array(uniforms, np.float32),
        "filtered_rows": np.flatnonzero(is_filtered),
    }

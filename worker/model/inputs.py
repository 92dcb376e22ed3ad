"""Turns a scheduled batch into the tensors of one step, prepared on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.interface import ScheduledBatch, ScheduledSequence
from worker.model.draws import uniform
from worker.model.interface import ForwardInputs
from worker.model.sampler import SamplingInputs
from worker.model.transfer import transfer

_Arrays: TypeAlias = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything that one step reads."""

    forward: ForwardInputs
    sampling: SamplingInputs | None
    """None where all rows are greedy."""
    carried_tokens: Tensor
    """[num_carried] int64: where ``forward.token_ids`` lacks tokens that the last step drew."""
    carried_rows: Tensor
    """[num_carried] int64: their rows in the last step's result."""


def build_inputs(batch: ScheduledBatch, block_size: int, device: torch.device) -> StepInputs:
    """Lay a batch out, single tokens first, and move it to ``device`` in one copy.

    Raises `ValueError` where the batch is empty, or a sequence has no tokens or too few blocks.
    """
    if not batch.sequences:
        raise ValueError("a batch without sequences")
    for sequence in batch.sequences:
        _check(sequence, block_size)
    num_decodes = sum(sequence.num_tokens == 1 for sequence in batch.sequences)
    packed = sorted(batch.sequences, key=lambda sequence: sequence.num_tokens > 1)
    query_lens = np.array([sequence.num_tokens for sequence in packed])
    sampling = _sampling_arrays([s for s in batch.sequences if s.is_sampled])
    tensors = transfer(
        _token_arrays(packed, query_lens, block_size)
        | _row_arrays(batch.sequences, query_lens, num_decodes)
        | sampling,
        device,
    )
    return StepInputs(
        forward=ForwardInputs(
            token_ids=tensors["token_ids"],
            positions=tensors["positions"],
            slots=tensors["slots"],
            query_starts=tensors["query_starts"],
            context_lens=tensors["context_lens"],
            block_tables=tensors["block_tables"],
            sampled_rows=tensors["sampled_rows"],
            num_decodes=num_decodes,
            max_query_len=int(query_lens.max()),
        ),
        sampling=SamplingInputs(**{name: tensors[name] for name in sampling}) if sampling else None,
        carried_tokens=tensors["carried_tokens"],
        carried_rows=tensors["carried_rows"],
    )


def _check(sequence: ScheduledSequence, block_size: int) -> None:
    end = sequence.start + sequence.num_tokens
    if not sequence.num_tokens or len(sequence.block_table) * block_size < end:
        raise ValueError(
            f"{sequence.num_tokens} tokens up to position {end} in {len(sequence.block_table)} "
            f"blocks of {block_size}"
        )


def _token_arrays(
    packed: Sequence[ScheduledSequence], query_lens: NDArray[Any], block_size: int
) -> _Arrays:
    """Lay out what belongs to each token, and where its sequence's context lies."""
    query_starts = np.concatenate(([0], query_lens.cumsum()))
    starts = np.array([sequence.start for sequence in packed])
    context_lens = starts + query_lens
    block_tables = np.zeros((len(packed), -(-context_lens.max() // block_size)), np.int32)
    for row, sequence in enumerate(packed):
        num_blocks = -(-context_lens[row] // block_size)
        block_tables[row, :num_blocks] = sequence.block_table[:num_blocks]
    owner = np.arange(len(packed)).repeat(query_lens)
    positions = np.arange(query_starts[-1]) - query_starts[owner] + starts[owner]
    blocks = block_tables[owner, positions // block_size].astype(np.int64)
    return {
        "token_ids": np.concatenate([np.array(s.token_ids, np.int64) for s in packed]),
        "positions": positions,
        "slots": blocks * block_size + positions % block_size,
        "query_starts": query_starts.astype(np.int32),
        "context_lens": context_lens.astype(np.int32),
        "block_tables": block_tables,
    }


def _row_arrays(
    sequences: Sequence[ScheduledSequence], query_lens: NDArray[Any], num_decodes: int
) -> _Arrays:
    """Find the last tokens: those to sample, in the batch's order, and those yet to come."""
    is_chunk = np.array([sequence.num_tokens > 1 for sequence in sequences])
    place = np.where(is_chunk, num_decodes + is_chunk.cumsum(), (~is_chunk).cumsum()) - 1
    last_token = query_lens.cumsum()[place] - 1
    carried = [i for i, s in enumerate(sequences) if s.previous_row is not None]
    return {
        "sampled_rows": last_token[[s.is_sampled for s in sequences]],
        "carried_tokens": last_token[np.array(carried, np.int64)],
        "carried_rows": np.array([sequences[i].previous_row for i in carried], np.int64),
    }


def _sampling_arrays(sampled: Sequence[ScheduledSequence]) -> _Arrays:
    """Empty where all rows are greedy."""
    if all(sequence.sampling.temperature == 0 for sequence in sampled):
        return {}
    params = [sequence.sampling for sequence in sampled]
    is_filtered = [p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params]
    uniforms = [uniform(s.seed, s.sequence_id.choice, s.position) for s in sampled]
    return {
        "temperatures": np.array([p.temperature for p in params], np.float32),
        "top_ks": np.array([p.top_k for p in params], np.int64),
        "top_ps": np.array([p.top_p for p in params], np.float32),
        "uniforms": np.array(uniforms, np.float32),
        "filtered_rows": np.flatnonzero(is_filtered),
    }

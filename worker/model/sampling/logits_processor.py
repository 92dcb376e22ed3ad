"""Logits processing before the draw: biases, penalties and bans."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.providers import Ops
from worker.engine.interface import ScheduledSequence, TokenPenalties


@dataclass(frozen=True, slots=True)
class EditInputs:
    """The edits to the logits of some tokens of some rows; rows and ids are int64."""

    bias_rows: Tensor
    """[num_biases], like the two fields below."""
    bias_ids: Tensor
    biases: Tensor
    """float32, added first."""
    penalty_rows: Tensor
    """[num_penalties], like the three fields below."""
    penalty_ids: Tensor
    repetitions: Tensor
    """float32; positive logits are divided by it, others multiplied."""
    subtracted: Tensor
    """float32, subtracted after that."""
    banned_rows: Tensor
    """[num_banned], like the field below."""
    banned_ids: Tensor
    masked_rows: Tensor
    """[num_masked]."""
    masks: Tensor
    """[num_masked, ceil(vocab_size / 32)] int32: bit t % 32 of word t // 32 allows token t."""


def edit_arrays(sampled: Sequence[ScheduledSequence]) -> dict[str, NDArray[Any]]:
    """Lay out the `EditInputs` of the sampled rows; empty if nothing is edited."""
    edited = [(row, s.edits) for row, s in enumerate(sampled) if s.edits is not None]
    if not edited:
        return {}
    masked = [(row, edits.mask) for row, edits in edited if edits.mask is not None]
    return {
        "bias_rows": _spread((row, len(edits.biases)) for row, edits in edited),
        "bias_ids": _flat((edits.biases for _, edits in edited), np.int64),
        "biases": _flat((edits.biases.values() for _, edits in edited), np.float32),
        **_penalty_arrays([(row, e.penalties) for row, e in edited if e.penalties is not None]),
        "banned_rows": _spread((row, len(edits.banned_ids)) for row, edits in edited),
        "banned_ids": _flat((edits.banned_ids for _, edits in edited), np.int64),
        "masked_rows": np.array([row for row, _ in masked], np.int64),
        "masks": np.array([np.frombuffer(mask, np.int32) for _, mask in masked], np.int32),
    }


def edit(ops: Ops, logits: Tensor, edits: EditInputs) -> Tensor:
    """Return the edited ``logits`` [num_sampled, vocab_size]; edits them in place."""
    if edits.bias_rows.numel():
        ones = torch.ones_like(edits.biases)
        logits = ops.adjust_logits(logits, edits.bias_rows, edits.bias_ids, ones, edits.biases)
    if edits.penalty_rows.numel():
        logits = ops.adjust_logits(
            logits, edits.penalty_rows, edits.penalty_ids, edits.repetitions, -edits.subtracted
        )
    if edits.banned_rows.numel():
        logits[edits.banned_rows, edits.banned_ids] = -torch.inf
    if edits.masked_rows.numel():
        logits = ops.mask_logits(logits, edits.masked_rows, edits.masks)
    return logits


def _penalty_arrays(penalized: list[tuple[int, TokenPenalties]]) -> dict[str, NDArray[Any]]:
    # Each token that occurred has an entry; the arrays are copied as they are.
    sizes = [len(penalties.token_ids) for _, penalties in penalized]
    nothing = np.zeros(0, np.int64)
    return {
        "penalty_rows": np.repeat([row for row, _ in penalized], sizes).astype(np.int64),
        "penalty_ids": np.concatenate(
            [nothing, *(np.frombuffer(p.token_ids, np.int64) for _, p in penalized)]
        ),
        "repetitions": np.repeat([p.repetition for _, p in penalized], sizes).astype(np.float32),
        "subtracted": np.concatenate(
            [
                nothing.astype(np.float32),
                *(np.frombuffer(p.subtracted, np.float32) for _, p in penalized),
            ]
        ),
    }


def _spread(counts: Iterable[tuple[int, int]]) -> NDArray[Any]:
    """Repeat each row by its count."""
    rows, sizes = zip(*counts, strict=True)
    return np.repeat(np.array(rows, np.int64), sizes)


def _flat(parts: Iterable[Iterable[float]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.array([value for part in parts for value in part], dtype)

"""Small steps that together launch every kernel that a step can, so that all are compiled before
the first request.

The largest step (see `worker.model.gpu_memory`) has neither decodes nor edited logits. Few and many
tokens take different kernels of AWQ; few and many sequences, decodes and chunks take different
kernels of attention.
"""

from array import array
from collections.abc import Iterator, Sequence

from shared.messages import SamplingParams
from worker.engine.cache.alone import BlocksAlone
from worker.engine.cache.layout import ONE_FULL, CacheGroup
from worker.engine.interface import (
    LogitEdits,
    ScheduledBatch,
    ScheduledSequence,
    SequenceId,
    TokenPenalties,
)

PROMPT_LENS = (12, 48, 100, 200)
"""Chunks of a prompt; AWQ has a separate kernel for each of these lengths."""
NUM_SEQS = (32, 33, 1025)
"""Attention has kernels for up to 32 sequences, for up to 1,024, and for up to 2,048."""
_NUM_FIRST = 8
_GREEDY = SamplingParams(temperature=0.0)
_DRAWN = SamplingParams(temperature=1.0)
_FILTERED = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=1)


def in_block_0(
    groups: Sequence[CacheGroup], start: int, end: int, block_size: int
) -> list[Sequence[int]]:
    """The tables of a step whose tokens and states are all in block 0."""
    tables = BlocksAlone(groups, block_size, end).of_step(start, end)
    return [[0] * len(table) for table in tables]


def first_steps(
    *, max_num_tokens: int, vocab_size: int, block_size: int, groups: Sequence[CacheGroup]
) -> list[ScheduledBatch]:
    """The prompt of a few tokens from all of the vocabulary, and a decode after it: the logits of
    any sound model are finite in both."""
    num_tokens = max(1, min(_NUM_FIRST, max_num_tokens - 1))
    token_ids = [k * vocab_size // num_tokens for k in range(num_tokens)]
    blocks = BlocksAlone(groups, block_size, min(num_tokens + 1, max_num_tokens))

    def step(start: int, token_ids: list[int]) -> ScheduledBatch:
        sequence = ScheduledSequence(
            sequence_id=SequenceId("first steps", 0),
            start=start,
            token_ids=token_ids,
            block_tables=blocks.of_step(start, start + len(token_ids)),
            is_sampled=True,
            sampling=_GREEDY,
            seed=0,
            position=0,
        )
        return ScheduledBatch([sequence])

    steps = [step(0, token_ids), step(num_tokens, token_ids[-1:])]
    return steps[:max_num_tokens]


def warm_steps(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_seq_len: int,
    block_size: int,
    vocab_size: int,
    groups: Sequence[CacheGroup] = ONE_FULL,
) -> Iterator[ScheduledBatch]:
    """Steps with decodes after short and after long contexts, alone and beside prompts of various
    lengths, with every way to edit and to draw.

    All tokens are in block 0, so any cache suffices, and the results have no meaning.
    """
    edits = LogitEdits(
        biases={0: 1.0},
        penalties=TokenPenalties(array("q", [0]), array("f", [0.5]), 1.1),
        banned_ids=[1],
        mask=b"\xff" * (-(-vocab_size // 32) * 4),
    )

    def share(
        start: int, num_tokens: int, sampling: SamplingParams, edits: LogitEdits | None = None
    ) -> ScheduledSequence:
        return ScheduledSequence(
            sequence_id=SequenceId("warm-up", 0),
            start=start,
            token_ids=[0] * num_tokens,
            block_tables=in_block_0(groups, start, start + num_tokens, block_size),
            is_sampled=True,
            sampling=sampling,
            seed=0,
            position=0,
            edits=edits,
        )

    for context_len in (0, max_seq_len - 1):
        for sampling in (_GREEDY, _DRAWN, _FILTERED):
            yield ScheduledBatch([share(context_len, 1, sampling, edits)])
        beside = [share(context_len, 1, _FILTERED)] if max_num_seqs > 1 else []
        most_tokens = min(max_num_batched_tokens - len(beside), max_seq_len)
        for prompt_len in sorted({min(prompt_len, most_tokens) for prompt_len in PROMPT_LENS}):
            if prompt_len:
                yield ScheduledBatch([*beside, share(0, prompt_len, _GREEDY)])
    for num_seqs in sorted({min(num_seqs, max_num_seqs) for num_seqs in NUM_SEQS}):
        longest = min(max_num_batched_tokens // num_seqs, max_seq_len)
        for num_tokens in sorted({1, 2, longest}):
            if num_tokens <= longest:
                yield ScheduledBatch([share(0, num_tokens, _GREEDY)] * num_seqs)

"""Which worker is to have a conversation: a choice that all gateways make alike.

The turns of a conversation share their beginning, whose keys and values are in the cache of the
worker that had the turns before. Rendezvous hashing (Thaler and Ravishankar, 1998) gives each
conversation an order of the workers, in which a worker that joins or leaves changes nothing for the
conversations of others. The first worker in that order that has no more than its part of the load
is the affinity target: consistent hashing with bounded loads (Mirrokni, Thorup and
Zadimoghaddam, 2018). The bound is on the load of the last seconds: the momentary load of a worker
varies so much that conversations would leave their caches all the time.

An affinity target is a preference only. A job without a target goes to the queue that all workers
share.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from shared.messages import (
    Announcement,
    ChatMessage,
    ChatPrompt,
    GenerationJob,
    TextPrompt,
    TokenPrompt,
)

_MIN_PROMPT_CHARS = 2_000
"""The shortest prompt without history for which a worker is chosen."""
_MIN_PROMPT_TOKENS = 500
_ROOT_CHARS = 1_000
_ROOT_TOKENS = 250
_MAX_LOAD = 1.25
"""The most load of an affinity target, relative to the mean of the workers. A higher bound would
concentrate the load, and a lower bound would move conversations more often."""
_BURST = 0.25
"""The fraction of its slots by which a target's momentary load may exceed that bound."""
_encoder = msgspec.msgpack.Encoder()


class Candidate(NamedTuple):
    """A live worker."""

    worker: Announcement
    mean_used: float
    """The slots that it has used recently, on average."""

    @property
    def slots(self) -> int:
        return self.worker.max_num_seqs

    @property
    def used(self) -> int:
        return num_used(self.worker)


def num_used(worker: Announcement) -> int:
    """The slots that a worker uses or needs at the moment."""
    return worker.num_running + worker.num_waiting


def root_of(job: GenerationJob) -> bytes | None:
    """A hash of what all turns of the job's conversation have in common; None if no cache would
    save much, because the prompt is new and short."""
    if len(job.prompts) > 1:
        return None
    start: object
    match job.prompts[0]:
        case ChatPrompt(messages=messages) if _has_history(messages) or _is_long(messages):
            start = _first_turn(messages)
        case TextPrompt(text=text) if len(text) >= _MIN_PROMPT_CHARS:
            start = text[:_ROOT_CHARS]
        case TokenPrompt(token_ids=token_ids) if len(token_ids) >= _MIN_PROMPT_TOKENS:
            start = token_ids[:_ROOT_TOKENS]
        case _:
            return None
    return blake2b(_encoder.encode((job.tenant, job.model, start)), digest_size=16).digest()


def target_of(root: bytes, candidates: Sequence[Candidate]) -> Announcement | None:
    """The worker that is to have the conversation with this root, of the ``candidates`` of its
    model; None if it has no free slot, or fewer than two take such jobs."""
    able = [one for one in candidates if one.worker.takes_near_jobs and one.slots]
    if len(able) < 2:
        return None
    load = sum(one.used / one.slots for one in able) / len(able)
    mean_load = sum(one.mean_used / one.slots for one in able) / len(able)
    bounded = [
        one
        for one in able
        if one.used <= (_MAX_LOAD * load + _BURST) * one.slots
        # A sequence that is alone never exceeds its part.
        and one.mean_used <= max(_MAX_LOAD * mean_load * one.slots, 1.0)
    ]
    if not bounded:
        return None
    chosen = max(bounded, key=lambda one: (_weight(root, one.worker), one.worker.worker))
    return chosen.worker if chosen.used < chosen.slots else None


def _weight(root: bytes, worker: Announcement) -> float:
    """A random number of the pair. Its distribution gives each worker as large a part of the
    conversations as it has of the slots."""
    digest = blake2b(worker.worker.encode(), key=root, digest_size=8).digest()
    uniform = ((int.from_bytes(digest) >> 12) + 0.5) / (1 << 52)  # in the open interval (0, 1)
    return -worker.max_num_seqs / math.log(uniform)


def _has_history(messages: Sequence[ChatMessage]) -> bool:
    return any(message.role == "assistant" for message in messages)


def _is_long(messages: Sequence[ChatMessage]) -> bool:
    return sum(len(message.content) for message in messages) >= _MIN_PROMPT_CHARS


def _first_turn(messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    """The messages up to the first message of the user."""
    first = next((k for k, message in enumerate(messages) if message.role == "user"), len(messages))
    return [(message.role, message.content) for message in messages[: first + 1]]

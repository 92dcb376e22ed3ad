"""Which requests are equal, so that a single execution answers all of them.

The tokens of an answer are a function of the job, the model and the numerics if the job is greedy
or has a seed, and its bytes are a function of the tokens and of how they are rendered. Two requests
are equal if all of these are equal.
"""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from shared.messages import Announcement, ChatPrompt, GenerationJob, SamplingParams


class Sameness(NamedTuple):
    """What equal requests have in common."""

    digest: str
    numerics: str
    """The numerics of the workers that may compute the answer."""


def sameness_of(
    job: GenerationJob, rendering: bytes, workers: Sequence[Announcement]
) -> Sameness | None:
    """What a request has in common with its equals; None if its answer is not determined.

    ``rendering`` is how its answer is rendered, without ids and times; ``workers`` are the live
    workers of its model. If they differ in weights, tokenizer or numerics, any of several answers
    may come, so that no two requests are equal. The same holds for a chat whose template may print
    the time of day, unless the prompt says which time.
    """
    arithmetics = {(worker.fingerprint, worker.numerics) for worker in workers}
    is_ours = all(not worker.engine for worker in workers)
    if len(arithmetics) != 1 or not is_ours or not is_determined(job.sampling):
        return None
    if _is_timed(job) and any(worker.template_tells_time for worker in workers):
        return None
    ((fingerprint, numerics),) = arithmetics
    same = msgspec.structs.replace(
        job,
        request_id="-",
        deadline=None,
        created_at=0.0,
        key_id="",
        is_counted=False,
        context=b"",
        trace={},
    )
    # Any chat template may print the date.
    day = datetime.fromtimestamp(job.created_at, UTC).date().isoformat()
    named = (msgspec.msgpack.encode(same), rendering, fingerprint, numerics, day)
    return Sameness(hashlib.sha256(msgspec.msgpack.encode(named)).hexdigest(), numerics)


def is_determined(sampling: SamplingParams) -> bool:
    """Whether equal jobs have equal answers: they are greedy or have a seed."""
    return sampling.is_greedy or sampling.seed is not None


def _is_timed(job: GenerationJob) -> bool:
    """Whether chat templates print the time at which the request was sent."""
    return any(isinstance(prompt, ChatPrompt) and not prompt.now for prompt in job.prompts)

"""Shortens conversations that exceed the model's context, for requests that allow it.

The oldest messages are left out, a turn at a time, so that what remains begins with a message of
the user, as many chat templates require. If the last turn alone is too long, its oldest calls are
left out with their outputs. System and developer messages and the last message of the user always
remain.
"""

import logging
import time
from collections.abc import Sequence
from itertools import accumulate

from msgspec import structs

from gateway.fleet.quick import QuickLane
from gateway.log.reply_queues import new_id
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.messages import ChatMessage, ChatPrompt, GenerationJob, Tokenized, TokenizeJob

logger = logging.getLogger(__name__)

_INSTRUCTING = ("system", "developer")


async def truncated(lane: QuickLane, job: GenerationJob, deadline: float) -> GenerationJob:
    """The job with as much of its only prompt, a chat, as fits the model's context together with
    the answer. A worker counts the tokens: once if all of it fits, otherwise of a number of shorter
    chats that is logarithmic in the number of messages. They are counted until ``deadline``, a Unix
    time, or that of the job.

    If nothing fits, the result is the shortest chat, which the worker refuses. Raises what
    `QuickLane.ask` raises.
    """
    (prompt,) = job.prompts
    assert isinstance(prompt, ChatPrompt)
    messages = prompt.messages
    starts = possible_starts(messages)
    if not starts or await _fits(lane, job, prompt, deadline):
        return job
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        shorter = structs.replace(prompt, messages=beginning_at(starts[middle], messages))
        if await _fits(lane, job, shorter, deadline):
            high = middle
        else:
            low = middle + 1
    left = beginning_at(starts[low], messages)
    fields = {"request_id": job.request_id, "num_messages_left_out": len(messages) - len(left)}
    logger.info("conversation truncated", extra=fields)
    return structs.replace(job, prompts=(structs.replace(prompt, messages=left),))


def possible_starts(messages: Sequence[ChatMessage]) -> list[int]:
    """The positions at which a shorter chat may begin, in order, and each position leaves out more
    than the position before. No tool output after a start lacks its call."""
    question = _question(messages)
    is_left_out = [not _is_kept(k, messages, question) for k in range(len(messages))]
    num_left_out = list(accumulate(is_left_out, initial=0))
    origins, needed = _origins(messages), len(messages)
    starts: dict[int, int] = {}
    for k in reversed(range(len(messages))):
        needed = min(needed, origins[k])
        role = messages[k].role
        is_turn = role == "user" or (role == "assistant" and k > question)
        if needed >= k and is_turn and num_left_out[k]:
            starts[num_left_out[k]] = k
    return [starts[num] for num in sorted(starts)]


def beginning_at(start: int, messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """The chat from ``start`` on, and before it the messages that always remain."""
    question = _question(messages)
    before = [messages[k] for k in range(start) if _is_kept(k, messages, question)]
    return (*before, *messages[start:])


def _question(messages: Sequence[ChatMessage]) -> int:
    """The position of the last message of the user; -1 if there is none."""
    return max((k for k, message in enumerate(messages) if message.role == "user"), default=-1)


def _is_kept(k: int, messages: Sequence[ChatMessage], question: int) -> bool:
    return k == question or messages[k].role in _INSTRUCTING


def _origins(messages: Sequence[ChatMessage]) -> list[int]:
    """The position of each output's call; of other messages their own."""
    calls: dict[str, int] = {}
    origins = []
    for k, message in enumerate(messages):
        is_output = message.role == "tool"
        origins.append(calls.get(message.tool_call_id or "", k) if is_output else k)
        calls.update((call.id, k) for call in message.tool_calls)
    return origins


async def _fits(lane: QuickLane, job: GenerationJob, prompt: ChatPrompt, deadline: float) -> bool:
    counting = TokenizeJob(
        request_id=new_id("count-"),
        model=job.model,
        prompt=prompt,
        tenant=job.tenant,
        key_id=job.key_id,
        deadline=min(deadline, job.deadline or deadline),
        created_at=time.time(),
        trace=job.trace,
    )
    try:
        counted = await lane.ask(counting, Tokenized)
    except (InvalidRequest, ContextLengthExceeded):
        # Too long to be counted, or refused by the chat template.
        return False
    sampling = job.sampling
    max_tokens = None if sampling.clamp_max_tokens else sampling.max_tokens
    num_answer_tokens = 1 if max_tokens is None else max_tokens
    return len(counted.token_ids) + num_answer_tokens <= counted.max_seq_len

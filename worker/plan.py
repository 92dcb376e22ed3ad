"""What a job asks of the engine, checked before any work is done."""

import asyncio
from dataclasses import dataclass

from shared.errors import ContextLengthExceeded
from shared.messages import ChatPrompt, GenerationJob, Prompt, TextPrompt, TokenPrompt
from worker.served_model import ServedModel

_MESSAGE_SIZE = 300
"""What a chat template and a name may add to a message."""
_INLINE_SIZE = 2000
"""Tokenizing so much takes less than the way to another thread and back, 0.5 ms."""


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One choice: what to continue, and how far at most."""

    prompt_ids: list[int]
    max_tokens: int


async def plan(job: GenerationJob, model: ServedModel) -> list[ChoicePlan]:
    """Tokenize the job's prompts. Raises `InvalidRequest` and `ContextLengthExceeded`."""
    if sum(_size(prompt) for prompt in job.prompts) <= _INLINE_SIZE:
        return _plan(job, model)
    return await asyncio.to_thread(_plan, job, model)


def _size(prompt: Prompt) -> int:
    """In characters or tokens, roughly."""
    match prompt:
        case ChatPrompt():
            return sum(_MESSAGE_SIZE + len(message.content) for message in prompt.messages)
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.token_ids)


def _plan(job: GenerationJob, model: ServedModel) -> list[ChoicePlan]:
    plans = []
    for prompt in job.prompts:
        prompt_ids = model.tokenizer.encode(prompt)
        room = model.max_seq_len - len(prompt_ids)
        # Without max_tokens there must be room for one token at least.
        wanted = 1 if job.sampling.max_tokens is None else job.sampling.max_tokens
        if wanted > room:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {model.max_seq_len} tokens. However, you "
                f"requested {len(prompt_ids) + wanted} tokens ({len(prompt_ids)} in the prompt, "
                f"{wanted} in the completion).",
                param="messages" if isinstance(prompt, ChatPrompt) else "prompt",
            )
        plans.append(ChoicePlan(prompt_ids, room if job.sampling.max_tokens is None else wanted))
    return plans

"""Plans a job: tokenizes and validates its prompts before any work is done."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.messages import (
    ChatPrompt,
    GenerationJob,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    encode,
)
from worker.decode.constraints import Grammar, token_mask
from worker.decode.served_model import ServedModel
from worker.text import Tokenizer

_MESSAGE_SIZE = 300
"""An upper estimate of what a chat template and a name add to a message, in characters."""
_INLINE_SIZE = 2000
"""Tokenizing this much takes less than the 0.5 ms of a round trip to another thread."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a job's choices may draw."""

    bad_words: list[list[int]]
    allowed: bytes | None
    """A bit mask, as `TokenConstraint.mask`; None: all tokens."""
    grammar: Grammar | None


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """The choices of one prompt: its token ids, the maximum length and the constraint."""

    prompt_ids: list[int]
    max_tokens: int
    vocabulary: Vocabulary


async def plan(job: GenerationJob, model: ServedModel) -> list[ChoicePlan]:
    """Tokenize the job's prompts and compile its constraint.

    Raises `InvalidRequest` and `ContextLengthExceeded`.
    """
    vocabulary = await _vocabulary(job, model)
    if sum(_size(prompt) for prompt in job.prompts) <= _INLINE_SIZE:
        # A template can render megabytes from a few characters. Such a text is left to the thread.
        with suppress(ContextLengthExceeded):
            return _plan(job, model, vocabulary, _INLINE_SIZE)
    return await model.texts.run(job.tenant, partial(_plan_long, job, model, vocabulary))


def prompt_texts(
    job: GenerationJob, plans: Iterable[ChoicePlan], tokenizer: Tokenizer
) -> tuple[str, ...]:
    """The text of each prompt, if the job requests it; for a chat, the output of the template."""
    if not job.wants_prompt_text:
        return ()
    return tuple(
        _text(prompt, plan.prompt_ids, tokenizer)
        for prompt, plan in zip(job.prompts, plans, strict=True)
    )


def _text(prompt: Prompt, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    stream = tokenizer.text_stream()
    return "".join(map(stream.push, prompt_ids)) + stream.flush()


def _size(prompt: Prompt) -> int:
    """The approximate size of a prompt, in characters or tokens."""
    match prompt:
        case ChatPrompt():
            return len(encode(prompt)) + _MESSAGE_SIZE * len(prompt.messages)
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.token_ids)


def _plan_long(job: GenerationJob, model: ServedModel, vocabulary: Vocabulary) -> list[ChoicePlan]:
    """The same for texts that may be too long to be tokenized."""
    return _plan(job, model, vocabulary, model.max_seq_len * model.tokenizer.max_entry_bytes)


def _plan(
    job: GenerationJob, model: ServedModel, vocabulary: Vocabulary, max_bytes: int
) -> list[ChoicePlan]:
    plans = []
    for prompt in job.prompts:
        prompt_ids = model.tokenizer.encode(_dated(prompt, job), max_bytes=max_bytes)
        room = model.max_seq_len - len(prompt_ids)
        max_tokens = job.sampling.max_tokens
        limit = model.max_seq_len if max_tokens is None else max_tokens
        # An answer that may end with the context needs room for its first token alone.
        does_end_with_context = max_tokens is None or job.sampling.clamp_max_tokens
        wanted = min(limit, 1) if does_end_with_context else limit
        if wanted > room:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {model.max_seq_len} tokens. However, you "
                f"requested {len(prompt_ids) + wanted} tokens ({len(prompt_ids)} in the prompt, "
                f"{wanted} in the completion).",
                param="messages" if isinstance(prompt, ChatPrompt) else "prompt",
            )
        plans.append(ChoicePlan(prompt_ids, min(limit, room), vocabulary))
    return plans


def _dated(prompt: Prompt, job: GenerationJob) -> Prompt:
    if not isinstance(prompt, ChatPrompt) or prompt.now:
        return prompt
    return structs.replace(prompt, now=job.created_at)


async def _vocabulary(job: GenerationJob, model: ServedModel) -> Vocabulary:
    sampling, tokenizer = job.sampling, model.tokenizer
    _check_ids(sampling.logit_bias, "logit_bias", tokenizer)
    _check_ids(sampling.stop_token_ids, "stop_token_ids", tokenizer)
    _check_ids(sampling.allowed_token_ids or (), "allowed_token_ids", tokenizer)
    constraint, grammar = sampling.constraint, None
    if constraint is not None:
        grammar = await model.constraints.compile(constraint, job.tenant)
    return Vocabulary(_bad_words(sampling, tokenizer), _allowed(sampling, tokenizer), grammar)


def _check_ids(token_ids: Iterable[int], param: str, tokenizer: Tokenizer) -> None:
    unknown = [token_id for token_id in token_ids if token_id >= tokenizer.vocab_size]
    if unknown:
        raise InvalidRequest(
            f"Token id {unknown[0]} is not in the vocabulary of {tokenizer.vocab_size}.",
            param=param,
        )


def _bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each word, both at the start of a text and within it. A tokenizer may have
    more tokens than the model, which never generates those."""
    texts = [text for word in sampling.bad_words for text in (word, f" {word.lstrip()}")]
    words = {tuple(tokenizer.encode_text(text)) for text in texts}
    return [list(word) for word in sorted(words) if word and max(word) < tokenizer.vocab_size]


def _allowed(sampling: SamplingParams, tokenizer: Tokenizer) -> bytes | None:
    if sampling.allowed_token_ids is None:
        return None
    return token_mask(sampling.allowed_token_ids, tokenizer.num_mask_bytes)

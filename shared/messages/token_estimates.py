"""About how many tokens a request has, before a worker has tokenized its prompts.

An estimate holds a place in the limits of an API key or a tenant until the worker's count replaces
it. Whatever a chat template may write into the prompt counts: messages with their names, reasoning
and tool calls, tools, and template variables.
"""

from shared.messages.codec import encode
from shared.messages.jobs import EmbeddingJob, GenerationJob, QuickJob
from shared.messages.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

_ANSWER_TOKENS = 1024
"""The tokens of an answer without ``max_tokens``, until it has ended."""
_BYTES_PER_TOKEN = 4
"""The ratio for a text, and for an encoded conversation, because the names of its fields take about
as much as a chat template adds."""
_EMPTY_BYTES = len(encode(ChatPrompt(messages=(ChatMessage(role="user", content="."),)))) - 1


def tokens_of(job: GenerationJob) -> int:
    """About how many tokens the prompts and answers of a job have, at most."""
    answer = job.sampling.max_tokens
    num_answer_tokens = _ANSWER_TOKENS if answer is None else answer
    return tokens_of_prompts(job.prompts) + num_answer_tokens * job.total_choices


def tokens_of_quick(job: QuickJob) -> int:
    """About how many tokens the prompts of a quick job have; 0 unless a model computes them."""
    return tokens_of_prompts(job.prompts) if isinstance(job, EmbeddingJob) else 0


def tokens_of_prompts(prompts: tuple[Prompt, ...]) -> int:
    """About how many tokens prompts have."""
    return sum(map(_num_tokens, prompts))


def _num_tokens(prompt: Prompt) -> int:
    match prompt:
        case TokenPrompt():
            return len(prompt.token_ids)
        case TextPrompt():
            num_bytes = len(prompt.text.encode())
        case ChatPrompt():
            num_bytes = max(0, len(encode(prompt)) - _EMPTY_BYTES)
    return -(-num_bytes // _BYTES_PER_TOKEN)

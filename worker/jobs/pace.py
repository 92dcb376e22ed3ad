"""How long a job takes at this worker, judged by the last jobs that it has run."""

from collections import deque
from collections.abc import Sequence

from shared.messages import GenerationJob, SamplingParams
from shared.messages.token_estimates import tokens_of_prompts

_NUM_REMEMBERED = 64
_MIN_REMEMBERED = 8
"""Fewer jobs say nothing about the next job."""
_MIN_PROMPT_TOKENS = 256
"""The time of a shorter prompt is that of a step rather than that of its tokens."""
_MIN_ANSWER_TOKENS = 8
_FASTEST = 0.5
"""A job may take this part of the time that the fastest of the last jobs would have taken, because
the worker may be less busy, or have drafts."""


class JobPace:
    """The durations of prompts and answers, by their tokens."""

    def __init__(self) -> None:
        self._prompts: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        """Seconds for each token of a prompt."""
        self._answers: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        """Seconds between two tokens of an answer."""
        self._lengths: deque[int] = deque(maxlen=_NUM_REMEMBERED)
        """The lengths of answers."""

    def learn_prompt(self, num_tokens: int, seconds: float) -> None:
        """Record how long a prompt took, from its submission to its first token."""
        if num_tokens >= _MIN_PROMPT_TOKENS:
            self._prompts.append(seconds / num_tokens)

    def learn_answer(self, num_tokens: int, seconds: float) -> None:
        """Record how long a choice took, from its first to its last token."""
        self._lengths.append(num_tokens)
        if num_tokens >= _MIN_ANSWER_TOKENS:
            self._answers.append(seconds / (num_tokens - 1))

    def expected_s(self, job: GenerationJob) -> float:
        """How long a job that begins now takes on average; 0 if nothing is known."""
        max_len = job.sampling.max_tokens
        num_tokens = max_len
        if max_len is None or not job.sampling.ignore_eos:
            usual = round(_mean(self._lengths))
            num_tokens = usual if max_len is None else min(max_len, usual)
        assert num_tokens is not None
        num_left = max(0, num_tokens - len(job.given_ids))
        return tokens_of_prompts(job.prompts) * _mean(self._prompts) + num_left * _mean(
            self._answers
        )

    def least_s(self, job: GenerationJob) -> float:
        """How long the tokens take that a job has in any case; 0 if that is not known."""
        return _FASTEST * least_tokens(job) * _least(self._answers)


def least_tokens(job: GenerationJob) -> int:
    """The least number of tokens that a choice of a job generates here."""
    sampling = job.sampling
    num_tokens = sampling.min_tokens
    if sampling.max_tokens is not None and not _may_end_early(sampling):
        num_tokens = sampling.max_tokens
    return max(0, num_tokens - len(job.given_ids))


def _may_end_early(sampling: SamplingParams) -> bool:
    """Whether an answer may have fewer than ``max_tokens``, although end tokens are ignored."""
    ends = (sampling.stop, sampling.stop_token_ids, sampling.constraint, sampling.clamp_max_tokens)
    return not sampling.ignore_eos or any(ends)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if len(values) >= _MIN_REMEMBERED else 0.0


def _least(values: Sequence[float]) -> float:
    return min(values) if len(values) >= _MIN_REMEMBERED else 0.0

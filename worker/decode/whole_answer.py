"""Accumulates an answer that is sent as a single message."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from shared.log import LogWriter
from shared.messages import (
    Choice,
    Completed,
    Finished,
    GenerationJob,
    PromptScores,
    TokenDelta,
    TokenLogprobs,
)

ChoiceEvent: TypeAlias = PromptScores | TokenDelta | Finished


class WholeAnswer:
    """Collects the events of a job's choices, which are written by ``log``."""

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self.log = LogWriter(1, job.total_choices)
        self._texts: defaultdict[int, str] = defaultdict(str)
        self._logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        self._scores: defaultdict[int, list[TokenLogprobs | None]] = defaultdict(list)
        self._ends: dict[int, Finished] = {}

    def keep(self, events: Iterable[ChoiceEvent]) -> None:
        for event in events:
            if isinstance(event, PromptScores):
                self._scores[event.prompt] += event.logprobs
                continue
            self._texts[event.choice] += event.text
            self._logprobs[event.choice] += event.logprobs
            if isinstance(event, Finished):
                self._ends[event.choice] = event

    def completed(
        self, num_prompt_tokens: Sequence[int], prompt_texts: tuple[str, ...]
    ) -> Completed:
        """The message, once all choices have finished."""
        choices = (
            Choice(
                token_ids=tuple(self.log.chains[k].token_ids),
                text=self._texts[k],
                finish_reason=end.finish_reason,
                stop_reason=end.stop_reason,
                num_prompt_tokens=num_prompt_tokens[k // self._job.num_choices],
                num_cached_tokens=end.num_cached_tokens,
                num_predicted_tokens=end.num_predicted_tokens,
                logprobs=tuple(self._logprobs[k]),
                has_end_token=end.has_end_token,
            )
            for k, end in sorted(self._ends.items())
        )
        scores = (tuple(self._scores[prompt]) for prompt in sorted(self._scores))
        return Completed(
            request_id=self._job.request_id,
            choices=tuple(choices),
            prompt_texts=prompt_texts,
            prompt_logprobs=tuple(scores),
        )

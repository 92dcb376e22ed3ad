"""Draws the tokens of an answer again, each after the answer's own tokens before it.

All tokens are given, so that a step computes hundreds of them, as it computes a prompt. A draw
depends on its context and its position alone: on a runner whose logits have the same bits whatever
else is in their step, the draws are the tokens of the answer, if the answer is that of this model.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shared.errors import InvalidRequest
from shared.messages import FinishReason
from worker.engine.cache.alone import BlocksAlone
from worker.engine.cache.layout import StateCache
from worker.engine.interface import (
    Judgement,
    LogitEdits,
    ModelRunner,
    ScheduledBatch,
    ScheduledSequence,
    StepOutput,
    Submit,
)
from worker.engine.logit_edits import editor


class _Draw(NamedTuple):
    """A token to draw."""

    edits: LogitEdits | None
    finish_reason: FinishReason | None
    """Why the answer ends if the given token is drawn; None: it goes on."""


class Redrawn(NamedTuple):
    """A token that was drawn again."""

    output: StepOutput
    judgement: Judgement | None
    """Of the given token, if it was to be judged."""


class Redrawing:
    """Draws the tokens of answers on a runner that nothing else uses."""

    def __init__(self, runner: ModelRunner, max_step_tokens: int) -> None:
        self._runner = runner
        self._max_step_tokens = max_step_tokens
        self._cached_ids: Sequence[int] = ()
        """The prompt whose tokens are in the cache."""

    def draw(
        self, submit: Submit, output_ids: Sequence[int], *, is_judged: bool = False
    ) -> Iterator[Redrawn]:
        """Draw each of ``output_ids``, the whole output of ``submit``, after the tokens before it.
        The finish reasons assume that the draws are these tokens. ``is_judged``: the runner judges
        the tokens, too.

        Ends early if a constraint leaves no token to draw. Raises `ValueError` if the tokens do not
        fit the cache.
        """
        draws = _draws(submit, output_ids)
        # The output's last token is drawn, and never computed.
        token_ids = [*submit.prompt_ids, *output_ids[: len(draws) - 1]]
        blocks = self._blocks(len(token_ids))
        last_of_prompt = len(submit.prompt_ids) - 1
        start = last_of_prompt if self._cached_ids == submit.prompt_ids else 0
        while draws and start < len(token_ids):
            end = min(start + self._max_step_tokens, len(token_ids))
            is_sampled = end > last_of_prompt
            first = max(start, last_of_prompt)
            position = first - last_of_prompt
            due = draws[position : end - last_of_prompt] if is_sampled else []
            share = ScheduledSequence(
                sequence_id=submit.sequence_id,
                start=start,
                token_ids=token_ids[start:end],
                num_drafts=max(0, len(due) - 1),
                block_tables=blocks.of_step(start, end),
                is_sampled=is_sampled,
                sampling=submit.sampling,
                seed=submit.seed,
                position=position,
                edits=due[0].edits if due else None,
                draft_edits=[draw.edits for draw in due[1:] if draw.edits is not None],
                stated_ids=output_ids[position : position + len(due)] if is_judged else (),
            )
            step = self._runner.launch(ScheduledBatch((share,)))
            drawn = step.result()
            if due:
                # A state is that of the last token, and not that of the prompt's.
                self._cached_ids = () if self._has_states else submit.prompt_ids
                judged = step.scores().judged if is_judged else [None] * len(due)
                for token_id, draw, judgement in zip(drawn, due, judged, strict=True):
                    output = StepOutput(submit.sequence_id, token_id, draw.finish_reason)
                    yield Redrawn(output, judgement)
            start = end

    @property
    def _has_states(self) -> bool:
        return any(isinstance(group, StateCache) for group in self._runner.groups)

    def _blocks(self, num_tokens: int) -> BlocksAlone:
        """Blocks for so many tokens. Raises `ValueError` if there are too few."""
        blocks = BlocksAlone(self._runner.groups, self._runner.block_size, num_tokens)
        if blocks.num_blocks > self._runner.num_blocks:
            raise ValueError(f"{num_tokens} tokens do not fit the KV cache")
        return blocks


def _draws(submit: Submit, output_ids: Sequence[int]) -> list[_Draw]:
    """What each draw needs, up to the first that the constraint does not allow."""
    edits = editor(submit)
    eos_ids = frozenset() if submit.sampling.ignore_eos else submit.eos_ids
    end_ids = eos_ids.union(submit.sampling.stop_token_ids)
    draws: list[_Draw] = []
    try:
        for position, token_id in enumerate(output_ids):
            current = None
            if edits is not None:
                edits.prepare(position)
                current = _copied(edits.edits(position))
            is_last = position + 1 == submit.max_tokens
            draws.append(_Draw(current, "length" if is_last else None))
            if token_id in end_ids:
                draws[-1] = _Draw(current, "stop")
            elif edits is not None:
                edits.take(token_id)
                if edits.is_complete:
                    draws[-1] = _Draw(current, "stop")
    except InvalidRequest:
        pass  # the draw of the token that is not allowed shows the difference
    return draws


def _copied(edits: LogitEdits) -> LogitEdits:
    """Edits that do not change with the next token."""
    if edits.penalties is None:
        return edits
    token_ids, subtracted, repetition = edits.penalties
    penalties = type(edits.penalties)(array("q", token_ids), array("f", subtracted), repetition)
    return edits._replace(penalties=penalties)

"""The format of the answers of POST /v1/completions."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from msgspec import UNSET

from gateway.api.render.formats import ChunkChoice, Completion, TextChoice, or_unset
from gateway.api.render.gathering import GatheredChoice, Gathering
from gateway.api.render.logprobs import (
    TextLogprobs,
    TextScale,
    joined,
    prompt_logprobs,
    shown_logprobs,
)
from gateway.api.rendering import Rendering
from gateway.text.pieces import Piece
from shared.messages import Finished, PromptScores, Started, TokenDelta, TokenLogprobs


class TextChunks:
    """The words of a stream. Where the prompt is echoed, it is each choice's first chunk."""

    chunk_object = "text_completion"

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._scales: defaultdict[int, TextScale] = defaultdict(
            partial(TextScale, as_ids=rendering.tokens_as_ids)
        )
        self._prompt_texts: tuple[str, ...] = ()
        self._num_prompt_tokens: tuple[int, ...] = ()
        self._scored_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._scores: defaultdict[int, list[TokenLogprobs | None]] = defaultdict(list)

    def opening(self, event: Started) -> list[ChunkChoice]:
        self._prompt_texts = event.prompt_texts
        self._num_prompt_tokens = event.num_prompt_tokens
        if not self._rendering.echo or self._rendering.logprobs is not None:
            return []
        return [self.plain(k, self._prompt(k)) for k in range(self._rendering.total_drawn)]

    def scores(self, event: PromptScores) -> list[ChunkChoice]:
        """The echo has its logprobs, once these are all there."""
        prompt = event.prompt
        self._scored_ids[prompt] += event.token_ids
        self._scores[prompt] += event.logprobs
        is_complete = len(self._scores[prompt]) == self._num_prompt_tokens[prompt]
        if not is_complete or not self._rendering.echo or self._rendering.logprobs is None:
            return []
        first = prompt * self._rendering.num_drawn
        return [self._echo(k) for k in range(first, first + self._rendering.num_drawn)]

    def tokens(self, event: TokenDelta | Finished, pieces: Sequence[Piece]) -> list[ChunkChoice]:
        shown = () if self._rendering.logprobs is None else shown_logprobs(self._rendering, event)
        if not event.text and not shown:
            return []
        logprobs = self._scales[event.choice].read(shown) if shown else None
        return [TextChoice(index=event.choice, text=event.text, logprobs=logprobs)]

    def plain(self, choice: int, text: str) -> ChunkChoice:
        return TextChoice(index=choice, text=text)

    def ending(self, event: Finished, *, has_called: bool) -> ChunkChoice:
        return TextChoice(
            index=event.choice,
            text="",
            finish_reason=event.finish_reason,
            stop_reason=or_unset(event.stop_reason),
        )

    def _prompt(self, choice: int) -> str:
        return self._prompt_texts[choice // self._rendering.num_drawn]

    def _echo(self, choice: int) -> ChunkChoice:
        prompt, text = choice // self._rendering.num_drawn, self._prompt(choice)
        scale = self._scales[choice]
        logprobs = scale.echo(text, self._scored_ids[prompt], self._scores[prompt])
        return TextChoice(index=choice, text=text, logprobs=logprobs)


def whole_completion(gathering: Gathering) -> Completion:
    """The answer to a request that does not stream."""
    rendering = gathering.rendering
    return Completion(
        id=rendering.request_id,
        created=rendering.created,
        model=rendering.model,
        choices=[_choice(gathering, k, choice) for k, choice in enumerate(gathering.choices)],
        usage=gathering.usage,
        system_fingerprint=gathering.system_fingerprint or UNSET,
    )


def _choice(gathering: Gathering, index: int, choice: GatheredChoice) -> TextChoice:
    rendering = gathering.rendering
    prompt = choice.index // rendering.num_drawn
    echo = gathering.prompt_texts[prompt] if rendering.echo else ""
    return TextChoice(
        index=index,
        text=echo + choice.text,
        logprobs=None if rendering.logprobs is None else _logprobs(gathering, choice, prompt, echo),
        finish_reason=choice.finish_reason,
        stop_reason=or_unset(choice.stop_reason),
        prompt_logprobs=(
            UNSET
            if rendering.prompt_logprobs is None
            else prompt_logprobs(gathering.prompt_scores[prompt])
        ),
    )


def _logprobs(gathering: Gathering, choice: GatheredChoice, prompt: int, echo: str) -> TextLogprobs:
    scale = TextScale(as_ids=gathering.rendering.tokens_as_ids)
    if not gathering.rendering.echo:
        return scale.read(choice.logprobs)
    echoed = scale.echo(echo, gathering.prompt_ids[prompt], gathering.prompt_scores[prompt])
    return joined(echoed, scale.read(choice.logprobs))

"""Sampling parameters and output constraints."""

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.messages.fields import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_GRAMMAR_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    NumTopLogprobs,
    Penalty,
    Probability,
    StopString,
    TokenId,
    TokenIds,
)


class Constraint(Struct, frozen=True, kw_only=True):
    """A constraint that the whole output must satisfy."""

    kind: Literal["json_schema", "regex", "lark"]
    source: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]
    """A JSON schema as JSON, a regular expression, or a grammar in llguidance's Lark syntax."""


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of a choice. The same seed and prompt give the same tokens on any
    worker of equal numerics.

    Logits processing is in this order: ``logit_bias``, penalties, bans (``min_tokens``,
    ``bad_words``, ``allowed_token_ids``, the constraint), temperature, ``top_k``, ``top_p``.
    ``top_p`` counts only the probabilities of the tokens that ``top_k`` leaves. ``min_p`` depends
    on neither of them: it compares each token with the most likely token. Logprobs are computed
    from the logits before processing.
    """

    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    """None: up to the model's context length."""
    clamp_max_tokens: bool = False
    """If ``max_tokens`` exceed what the prompt leaves of the context, end there."""
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    """0 is greedy: the most likely token, regardless of ``top_p``, ``top_k``, ``min_p`` and
    ``seed``."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Excludes all but the most likely tokens whose probabilities add up to this."""
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """Excludes all but this many most likely tokens; 0: none."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    """None: derived from the request id, so that a redelivered job draws the same numbers."""
    stop: Annotated[tuple[StopString, ...], Meta(max_length=MAX_STOP_STRINGS)] = ()
    """Strings that end the text. They are not part of it."""
    ignore_eos: bool = False
    """Continue after an end token."""
    min_p: Probability = 0.0
    """Excludes tokens whose probability is below this fraction of the most likely token's."""
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    """Applied to tokens in the prompt or output (Keskar et al., arXiv:1909.05858)."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of each token in the output."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logit of a token for each of its occurrences in the output."""
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MAX_BIASES)
    ] = {}
    """Added to the logits of tokens, by token id."""
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """Before this number of tokens, neither an end token nor a token of ``stop_token_ids`` is
    drawn, and no stop string ends the text within them."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()
    """Tokens that end the text."""
    bad_words: Annotated[tuple[StopString, ...], Meta(max_length=MAX_BAD_WORDS)] = ()
    """Texts that are never generated: the last token of each is banned after its others."""
    allowed_token_ids: Annotated[TokenIds, Meta(min_length=1)] | None = None
    """None: all tokens."""
    constraint: Constraint | None = None
    logprobs: NumTopLogprobs | None = None
    """Return the logprobs of each token and of this many most likely tokens; None: no logprobs."""
    prompt_logprobs: NumTopLogprobs | None = None
    """The same for the prompt's tokens."""
    include_stop_in_output: bool = False
    """Keep the matched stop string in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    @property
    def is_greedy(self) -> bool:
        """Whether only the most likely token may be drawn, so that the seed has no effect."""
        return self.temperature == 0 or self.top_k == 1

    def used(self, names: Iterable[str]) -> list[str]:
        """The parameters among ``names`` that have another value than the default."""
        default = SamplingParams()
        return [name for name in names if getattr(self, name) != getattr(default, name)]

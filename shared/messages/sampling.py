"""How tokens are drawn."""

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
    """What the output has to match, from its first token to its last."""

    kind: Literal["json_schema", "regex", "lark"]
    source: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]
    """A JSON schema as JSON, a regular expression, or a grammar in llguidance's Lark syntax."""


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one choice is drawn. The same seed and prompt give the same tokens on any worker.

    The logits are changed in this order: ``logit_bias``, penalties, bans (``min_tokens``,
    ``bad_words``, ``allowed_token_ids``, the constraint), temperature, ``min_p``, ``top_k``,
    ``top_p``. Logprobs are of the logits before all that.
    """

    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    """None: as many as the model's context still holds."""
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    """0 is greedy: the most likely token, whatever ``top_p``, ``top_k``, ``min_p`` and ``seed``
    say."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """0: all tokens."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    """None: drawn from the request id, so that a redelivered job draws the same numbers."""
    stop: Annotated[tuple[StopString, ...], Meta(max_length=MAX_STOP_STRINGS)] = ()
    ignore_eos: bool = False
    min_p: Probability = 0.0
    """Drops tokens less likely than this share of the most likely one's probability."""
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    """Of tokens in prompt or output (Keskar et al., arXiv:1909.05858)."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of each token in the output."""
    frequency_penalty: Penalty = 0.0
    """The same, for each time that it is there."""
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MAX_BIASES)
    ] = {}
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """Before so many tokens no end token and none of ``stop_token_ids`` is drawn."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()
    bad_words: Annotated[tuple[StopString, ...], Meta(max_length=MAX_BAD_WORDS)] = ()
    """Texts whose last token is never drawn after the others."""
    allowed_token_ids: Annotated[TokenIds, Meta(min_length=1)] | None = None
    """None: all tokens."""
    constraint: Constraint | None = None
    logprobs: NumTopLogprobs | None = None
    """Tell each token's logprob, and so many of the most likely ones; None: tell nothing."""
    prompt_logprobs: NumTopLogprobs | None = None
    """The same for the prompt's tokens."""
    include_stop_in_output: bool = False
    """Leave the stop string in the text."""
    skip_special_tokens: bool = True

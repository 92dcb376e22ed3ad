"""Receipts: what an answer was computed from, as its worker states it and as a gateway signs it.

`Provenance` travels in the log of a request that asks for a receipt. `Receipt` is the document that
a gateway writes as canonical JSON (RFC 8785) and signs. Numbers that canonical JSON cannot hold,
such as a seed of 64 bits, are strings.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

from msgspec import Struct

from shared.messages.fields import Count, FinishReason, TokenIds, UnixTime
from shared.messages.sampling import SamplingParams

RECEIPT_VERSION = 1


class PromptFacts(Struct, frozen=True, kw_only=True):
    """A prompt of an answer."""

    num_tokens: Count
    sha256: str
    """`hash_ids` of its token ids."""
    max_tokens: Count
    """The most tokens that an answer to it may have, with the room that the context leaves."""


class Provenance(Struct, frozen=True, kw_only=True):
    """What a worker computes an answer from."""

    fingerprint: str
    """That of the worker's announcement."""
    tokenizer: str
    """The SHA-256 hash of the model's tokenizer.json."""
    weight_format: str
    dtype: str
    version: str
    """The worker's version of Warren."""
    started_at: UnixTime
    """When the prompts were ready, by the worker's clock."""
    prompts: tuple[PromptFacts, ...]


class ReceiptRun(Struct, frozen=True, kw_only=True):
    """A run of the job: the first run, or a run that took the job over."""

    worker: str
    attempt: Count
    numerics: str
    num_tokens_before: tuple[Count, ...]
    """The tokens that each choice had when the run began."""
    provenance: Provenance | None
    """None: the worker is too old to state it."""


class ReceiptChoice(Struct, frozen=True, kw_only=True):
    """An answer to a prompt, without its text."""

    token_ids: TokenIds
    finish_reason: FinishReason
    stop_reason: str | int | None
    text_sha256: str
    """The SHA-256 hash of the choice's text, with its reasoning and its calls as the model wrote
    them, in UTF-8."""


class ReceiptUsage(Struct, frozen=True, kw_only=True):
    """The tokens of all prompts and choices together."""

    prompt_tokens: Count
    cached_tokens: Count
    completion_tokens: Count


class Receipt(Struct, frozen=True, kw_only=True):
    """What a gateway signs of a finished answer."""

    version: int = RECEIPT_VERSION
    id: str
    """The request's id."""
    endpoint: str
    model: str
    request_sha256: str
    """The SHA-256 hash of the request's body as canonical JSON."""
    sampling: SamplingParams
    """The parameters that the job had, without the seed."""
    seed: str
    """The seed of choice 0, an unsigned decimal number of 64 bits."""
    num_choices: Count
    """The answers that were generated to each prompt."""
    num_given_tokens: Count = 0
    """The first tokens of each choice that another answer gave it."""
    choices: tuple[ReceiptChoice, ...]
    """All answers that were generated, in the order of their prompts."""
    usage: ReceiptUsage
    executions: tuple[ReceiptRun, ...]
    created_at: UnixTime
    """When the request arrived, which is the time that chat templates print."""
    issued_at: UnixTime
    gateway_version: str


def hash_ids(token_ids: Sequence[int]) -> str:
    """The SHA-256 hash of token ids, each as an unsigned little-endian integer of 32 bits."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()


def hash_text(parts: Iterable[str]) -> str:
    """The SHA-256 hash of a text, which ``parts`` make up, in UTF-8."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()


def prompt_facts(token_ids: Sequence[int], max_tokens: int) -> PromptFacts:
    return PromptFacts(num_tokens=len(token_ids), sha256=hash_ids(token_ids), max_tokens=max_tokens)

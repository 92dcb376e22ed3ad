"""What clients ask of workers."""

import hashlib
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from shared.messages.fields import (
    MAX_CHOICES,
    MAX_EMBEDDING_INPUTS,
    MAX_PROMPTS,
    WIRE_VERSION,
    Context,
    Count,
    ModelName,
    RequestId,
    Tenant,
    TokenIds,
    UnixTime,
    Wire,
)
from shared.messages.prompts import Prompt
from shared.messages.sampling import SamplingParams


class GenerationJob(Wire, frozen=True, kw_only=True):
    """One request. Choice k of the answer continues ``prompts[k // num_choices]``."""

    request_id: RequestId
    model: ModelName
    prompts: Annotated[tuple[Prompt, ...], Meta(min_length=1, max_length=MAX_PROMPTS)]
    num_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """Answers to each prompt."""
    sampling: SamplingParams = SamplingParams()
    mode: Literal["stream", "final"] = "final"
    """``stream``: the whole log of events. ``final``: one `Completed` or `Failed`."""
    deadline: UnixTime | None = None
    """Seconds; afterwards the job is answered with ``deadline_exceeded``."""
    created_at: UnixTime = 0.0
    """Seconds, at the publisher; 0 if it did not say."""
    tenant: Tenant = ""
    """Only jobs of one tenant share cached prefixes."""
    is_detached: bool = False
    """The client may be away: a reply queue without a reader does not cancel the job."""
    wants_prompt_text: bool = False
    """`Started` is to bear the text of each prompt."""
    publication: Count = 0
    """How often this request was published before. What an older publication starts after a newer
    one has started is superseded."""
    context: Context = b""
    """What whoever reads the log has to know of the request: comes back in `Started`."""
    trace: Annotated[dict[str, str], Meta(max_length=16)] = field(default_factory=dict)
    """W3C trace context of the publisher."""
    version: int = WIRE_VERSION

    @property
    def total_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.num_choices

    @property
    def seed(self) -> int:
        """The seed of choice 0 as an unsigned 64-bit number."""
        if self.sampling.seed is not None:
            return self.sampling.seed % (1 << 64)
        return int.from_bytes(hashlib.sha256(self.request_id.encode()).digest()[:8], "big")


class TokenizeJob(Wire, frozen=True, kw_only=True):
    """Answered with `Tokenized`."""

    request_id: RequestId
    model: ModelName
    prompt: Prompt
    deadline: UnixTime | None = None
    version: int = WIRE_VERSION


class DetokenizeJob(Wire, frozen=True, kw_only=True):
    """Answered with `Detokenized`."""

    request_id: RequestId
    model: ModelName
    token_ids: TokenIds
    deadline: UnixTime | None = None
    version: int = WIRE_VERSION


class EmbeddingJob(Wire, frozen=True, kw_only=True):
    """Answered with `Embedded`."""

    request_id: RequestId
    model: ModelName
    prompts: Annotated[tuple[Prompt, ...], Meta(min_length=1, max_length=MAX_EMBEDDING_INPUTS)]
    num_dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Keep the first so many and scale to length 1; None: all."""
    tenant: Tenant = ""
    deadline: UnixTime | None = None
    version: int = WIRE_VERSION


QuickJob: TypeAlias = TokenizeJob | DetokenizeJob | EmbeddingJob
"""What does not wait behind generations, and is answered with one message."""

"""The bodies and answers of the endpoints that tokenize, detokenize and embed."""

import base64
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

from msgspec import Meta, Raw, Struct, field, json, structs

from gateway.api.bodies.conversations import (
    Messages,
    Tools,
    chat_messages,
    chat_tools,
    template_kwargs,
)
from gateway.api.bodies.parsing import QUICK_NEUTRAL, Body, refused
from gateway.api.bodies.schemas import TextOrTokens, check_model, text_prompts
from gateway.fleet.quick import QuickLane
from shared.messages import (
    MAX_EMBEDDING_DIMENSIONS,
    MAX_EMBEDDING_INPUTS,
    Announcement,
    ChatPrompt,
    Detokenized,
    DetokenizeJob,
    Embedded,
    EmbeddingJob,
    Prompt,
    QuickJob,
    TextPrompt,
    TokenIds,
    Tokenized,
    TokenizeJob,
)
from shared.messages.fields import Text
from shared.off_loop import off_loop

_BYTES_OF_FLOAT = 32
"""The number itself, and its place in the vector."""


class TokenizeResponse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: Sequence[str] | None


class PromptText(Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str


class Embedding(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="object",
    tag="embedding",
):
    index: int
    embedding: Sequence[float] | str


class EmbeddingUsage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt_tokens: int
    total_tokens: int


class Embeddings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="object", tag="list"
):
    model: str
    data: Sequence[Embedding]
    usage: EmbeddingUsage


class QuickDraft(Struct, frozen=True):
    """The fields of a job that are not in the body."""

    model: str
    request_id: str
    deadline: float
    tenant: str
    key_id: str = ""
    created_at: float = 0.0
    trace: dict[str, str] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        return structs.asdict(self)


class QuickBody(Body, frozen=True, kw_only=True):
    """The base of these bodies."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = QUICK_NEUTRAL
    model: Annotated[str, Meta(description="Optional if there is only one model.")] | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            check_model(self.model)

    def check(self, served: Announcement | None) -> None:
        """Check token ids against the model's vocabulary. Raises `InvalidRequest`."""


class TokenizeRequest(QuickBody, frozen=True, kw_only=True):
    """A prompt, or messages as in a chat."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        name: values for name, values in QUICK_NEUTRAL.items() if name != "add_special_tokens"
    }
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools = ()
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    return_token_strs: bool = False

    def job(self, draft: QuickDraft) -> TokenizeJob:
        """Raises `InvalidRequest`."""
        return TokenizeJob(**draft.fields(), prompt=self._prompt())

    async def answer(self, lane: QuickLane, job: QuickJob) -> TokenizeResponse:
        tokenized = await lane.ask(job, Tokenized)
        return TokenizeResponse(
            count=len(tokenized.token_ids),
            max_model_len=tokenized.max_seq_len,
            tokens=tokenized.token_ids,
            token_strs=tokenized.tokens if self.return_token_strs else None,
        )

    def _prompt(self) -> Prompt:
        if self.messages is None and self.prompt is not None:
            return TextPrompt(text=self.prompt, add_special_tokens=self.add_special_tokens)
        if self.messages is None or self.prompt is not None:
            raise refused("prompt", "expected either prompt or messages.")
        return ChatPrompt(
            messages=chat_messages(self.messages),
            tools=chat_tools(self.tools).functions,
            template_kwargs=template_kwargs(self.chat_template_kwargs),
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
        )


class DetokenizeRequest(QuickBody, frozen=True, kw_only=True):
    """Token ids."""

    tokens: TokenIds

    def job(self, draft: QuickDraft) -> DetokenizeJob:
        return DetokenizeJob(**draft.fields(), token_ids=self.tokens)

    def check(self, served: Announcement | None) -> None:
        largest = max(self.tokens, default=0)
        if served is not None and largest >= served.vocab_size:
            raise refused("tokens", f"token id {largest} is not in the vocabulary.")

    async def answer(self, lane: QuickLane, job: QuickJob) -> PromptText:
        detokenized = await lane.ask(job, Detokenized)
        return PromptText(prompt=detokenized.text)


class EmbeddingRequest(QuickBody, frozen=True, kw_only=True):
    """The body of ``POST /v1/embeddings``."""

    input: TextOrTokens
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_EMBEDDING_DIMENSIONS,
                description="Truncate vectors to this many dimensions.",
            ),
        ]
        | None
    ) = None
    user: str | None = None

    def job(self, draft: QuickDraft) -> EmbeddingJob:
        """Raises `InvalidRequest`."""
        return EmbeddingJob(
            **draft.fields(),
            prompts=text_prompts(self.input, "input", MAX_EMBEDDING_INPUTS),
            num_dimensions=self.dimensions,
        )

    async def answer(self, lane: QuickLane, job: QuickJob) -> Embeddings:
        embedded = await lane.ask(job, Embedded)
        data = await off_loop(partial(self._encoded, embedded), num_vector_bytes(embedded))
        num_tokens = sum(embedded.num_prompt_tokens)
        usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        return Embeddings(model=job.model, data=data, usage=usage)

    def _encoded(self, embedded: Embedded) -> list[Embedding]:
        """The vectors, each encoded by itself: to encode all of them at once would keep the event
        loop from running, in whatever thread it is done."""
        return [
            Embedding(index=k, embedding=self._encoded_vector(vector))
            for k, vector in enumerate(embedded.vectors)
        ]

    def _encoded_vector(self, vector: Sequence[float]) -> str | Sequence[float]:
        if self.encoding_format == "float":
            return cast("Sequence[float]", Raw(json.encode(vector)))
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def num_vector_bytes(embedded: Embedded) -> int:
    """About the memory of the vectors."""
    return sum(map(len, embedded.vectors)) * _BYTES_OF_FLOAT

"""Bodies of the endpoints that tokenize and embed, and of their answers."""

import base64
import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from pydantic import Field

from gateway.api.bodies.json_values import misfit
from gateway.api.bodies.prompts import chat_prompt, completion_prompts, template_kwargs
from gateway.api.bodies.schemas import Body, Messages, Model, Prompts, TokenIds, Tools
from gateway.api.bodies.tool_choice import read_tools
from gateway.fleet.unary import QuickLane
from shared.errors import InvalidRequest
from shared.messages import (
    MAX_EMBEDDING_INPUTS,
    Announcement,
    Detokenized,
    DetokenizeJob,
    Embedded,
    EmbeddingJob,
    Tokenized,
    TokenizeJob,
)

_Job = TypeVar("_Job", TokenizeJob, DetokenizeJob, EmbeddingJob)


class QuickDraft(NamedTuple):
    """What a job has besides its body."""

    model: str
    request_id: str
    deadline: float
    tenant: str

    @property
    def fields(self) -> dict[str, Any]:
        return {"model": self.model, "request_id": self.request_id, "deadline": self.deadline}


class QuickBody(Body):
    """What the bodies share."""

    model: Model | None = Field(None, description="May be left out where there is one model.")

    def check(self, served: Announcement | None) -> None:
        """Refuse what the model's vocabulary does not have. Raises `InvalidRequest`."""


class TokenizeRequest(QuickBody):
    """A prompt, or messages as in a chat."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    def job(self, draft: QuickDraft) -> TokenizeJob:
        """Raises `InvalidRequest`."""
        return _converted(
            TokenizeJob,
            {
                **draft.fields,
                "prompt": self._prompt(),
            },
        )

    def _prompt(self) -> dict[str, Any]:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: expected one of prompt and messages.", param="prompt")
        if self.messages is None:
            return completion_prompts(self.prompt, add_special_tokens=self.add_special_tokens)[0]
        return chat_prompt(self.messages) | {
            "tools": [msgspec.to_builtins(tool) for tool in read_tools(self.tools)],
            "template_kwargs": template_kwargs(self.chat_template_kwargs),
            "add_generation_prompt": (
                self.add_generation_prompt and not self.continue_final_message
            ),
            "continue_final_message": self.continue_final_message,
        }

    async def answer(self, lane: QuickLane, draft: QuickDraft) -> dict[str, Any]:
        tokenized = await lane.ask(self.job(draft), Tokenized)
        return {
            "count": len(tokenized.token_ids),
            "max_model_len": tokenized.max_seq_len,
            "tokens": tokenized.token_ids,
            "token_strs": tokenized.tokens if self.return_token_strs else None,
        }


class DetokenizeRequest(QuickBody):
    """Token ids."""

    tokens: TokenIds

    def job(self, draft: QuickDraft) -> DetokenizeJob:
        """Raises `InvalidRequest`."""
        return _converted(
            DetokenizeJob,
            {
                **draft.fields,
                "token_ids": self.tokens,
            },
        )

    def check(self, served: Announcement | None) -> None:
        largest = max(self.tokens, default=0)
        if served is not None and largest >= served.vocab_size:
            raise InvalidRequest(f"tokens: there is no token {largest}.", param="tokens")

    async def answer(self, lane: QuickLane, draft: QuickDraft) -> dict[str, Any]:
        detokenized = await lane.ask(self.job(draft), Detokenized)
        return {"prompt": detokenized.text}


class EmbeddingRequest(QuickBody):
    """The body of ``POST /v1/embeddings``."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, description="Keep the first so many.")
    user: str | None = None

    def job(self, draft: QuickDraft) -> EmbeddingJob:
        """Raises `InvalidRequest`."""
        return _converted(
            EmbeddingJob,
            {
                **draft.fields,
                "prompts": completion_prompts(
                    self.input, name="input", max_prompts=MAX_EMBEDDING_INPUTS
                ),
                "num_dimensions": self.dimensions,
                "tenant": draft.tenant,
            },
        )

    async def answer(self, lane: QuickLane, draft: QuickDraft) -> dict[str, Any]:
        embedded = await lane.ask(self.job(draft), Embedded)
        num_tokens = sum(embedded.num_prompt_tokens)
        return {
            "object": "list",
            "model": draft.model,
            "data": [
                {"object": "embedding", "index": k, "embedding": self._encoded(vector)}
                for k, vector in enumerate(embedded.vectors)
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _encoded(self, vector: Sequence[float]) -> str | Sequence[float]:
        if self.encoding_format == "float":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _converted(kind: type[_Job], job: dict[str, Any]) -> _Job:
    try:
        return msgspec.convert({"type": kind.__struct_config__.tag, **job}, kind)
    except msgspec.ValidationError as error:
        raise _refused(*misfit(error)) from None


_NAMES = {
    "token_ids": "tokens",
    "prompts": "input",
    "num_dimensions": "dimensions",
}


def _refused(reason: str, place: str) -> InvalidRequest:
    path = place.removeprefix(".").removeprefix("prompt.")
    head = path.split("[")[0].split(".")[0]
    param = path if head in ("messages", "tools") else _NAMES.get(head, head)
    return InvalidRequest(f"{param}: {reason}", param=param)

"""What each operation answers, in the types of OpenAI's and Anthropic's packages."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import anthropic.types as anthropic_types
import httpx
from anthropic.types.shared import ErrorResponse as MessagesError
from openai import types
from openai.types import chat, conversations, responses, uploads, webhooks
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.shared import ErrorObject
from pydantic import BaseModel

from gateway.errors import is_messages
from tests.support.strictness.types import problems

_T = TypeVar("_T")


class ErrorBody(BaseModel):
    error: ErrorObject


class Models(BaseModel):
    object: Literal["list"]
    data: list[types.Model]


class Page(BaseModel, Generic[_T]):
    """A page of a list, for which the packages have only clients."""

    object: Literal["list"]
    data: list[_T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """For which the client has no type."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class Ping(BaseModel):
    type: Literal["ping"]


class LineResponse(BaseModel):
    status_code: int
    request_id: str
    body: Any


class LineError(BaseModel):
    code: str
    message: str


class OutputLine(BaseModel):
    """A line of the output or of the errors of a batch, as OpenAI documents it."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


class Answers(NamedTuple):
    whole: Any
    event: Any = None
    """Of a stream."""


_RESPONSE = Answers(responses.Response, responses.ResponseStreamEvent)
ANSWERS: Mapping[str, Answers] = {
    "POST /v1/chat/completions": Answers(chat.ChatCompletion, chat.ChatCompletionChunk),
    "POST /v1/completions": Answers(types.Completion, types.Completion),
    "POST /v1/responses": _RESPONSE,
    "GET /v1/responses/{response_id}": _RESPONSE,
    "POST /v1/responses/{response_id}/cancel": _RESPONSE,
    "DELETE /v1/responses/{response_id}": Answers(DeletedResponse),
    "GET /v1/responses/{response_id}/input_items": Answers(Page[responses.ResponseItem]),
    "POST /v1/responses/input_tokens": Answers(InputTokenCountResponse),
    "POST /v1/conversations": Answers(conversations.Conversation),
    "GET /v1/conversations/{conversation_id}": Answers(conversations.Conversation),
    "POST /v1/conversations/{conversation_id}": Answers(conversations.Conversation),
    "DELETE /v1/conversations/{conversation_id}": Answers(
        conversations.ConversationDeletedResource
    ),
    "POST /v1/conversations/{conversation_id}/items": Answers(conversations.ConversationItemList),
    "GET /v1/conversations/{conversation_id}/items": Answers(conversations.ConversationItemList),
    "GET /v1/conversations/{conversation_id}/items/{item_id}": Answers(
        conversations.ConversationItem
    ),
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": Answers(
        conversations.Conversation
    ),
    "POST /v1/embeddings": Answers(types.CreateEmbeddingResponse),
    "GET /v1/models": Answers(Models),
    "GET /v1/models/{model}": Answers(types.Model),
    "POST /v1/files": Answers(types.FileObject),
    "GET /v1/files": Answers(Page[types.FileObject]),
    "GET /v1/files/{file_id}": Answers(types.FileObject),
    "DELETE /v1/files/{file_id}": Answers(types.FileDeleted),
    "POST /v1/uploads": Answers(types.Upload),
    "POST /v1/uploads/{upload_id}/parts": Answers(uploads.UploadPart),
    "POST /v1/uploads/{upload_id}/complete": Answers(types.Upload),
    "POST /v1/uploads/{upload_id}/cancel": Answers(types.Upload),
    "POST /v1/batches": Answers(types.Batch),
    "GET /v1/batches": Answers(Page[types.Batch]),
    "GET /v1/batches/{batch_id}": Answers(types.Batch),
    "POST /v1/batches/{batch_id}/cancel": Answers(types.Batch),
    "POST /v1/messages": Answers(
        anthropic_types.Message, anthropic_types.RawMessageStreamEvent | Ping
    ),
    "POST /v1/messages/count_tokens": Answers(anthropic_types.MessageTokensCount),
    "POST /admin/v1/webhooks": Answers(webhooks.WebhookEndpointWithSecret),
    "GET /admin/v1/webhooks": Answers(webhooks.WebhookEndpointList),
    "GET /admin/v1/webhooks/{webhook_id}": Answers(webhooks.WebhookEndpoint),
    "POST /admin/v1/webhooks/{webhook_id}": Answers(webhooks.WebhookEndpoint),
    "DELETE /admin/v1/webhooks/{webhook_id}": Answers(webhooks.DeletedWebhookEndpoint),
    "POST /admin/v1/webhooks/{webhook_id}/rotate_secret": Answers(
        webhooks.WebhookEndpointWithSecret
    ),
    "POST /admin/v1/webhooks/{webhook_id}/test": Answers(webhooks.WebhookEndpointTestResult),
}
"""By operation, as the OpenAPI document names it."""
UNTYPED_OPERATIONS = {
    "GET /v1/responses",
    "DELETE /v1/streams/{stream_id}",
    "GET /v1/streams/{stream_id}",
    "GET /v1/streams/{stream_id}/receipt",
    "POST /v1/streams/{stream_id}/fork",
    "GET /.well-known/jwks.json",
    "GET /v1/files/{file_id}/content",
    "GET /v1/usage",
    "POST /detokenize",
    "POST /tokenize",
    "POST /v1/replays",
    "POST /v1/rerank",
    "POST /v1/score",
}
"""The answers for which neither package has a type."""
_PATTERNS = [
    (name, re.compile(re.sub(r"{\w+}", "[^/]+", name).replace("/", r"\/") + r"\Z"))
    for name in sorted(ANSWERS, key=lambda name: name.count("{"))
]


def operation_of(answer: httpx.Response) -> str:
    """The operation that has answered. Raises StopIteration if it is none of `ANSWERS`."""
    asked = f"{answer.request.method} {answer.request.url.path}"
    return next(name for name, pattern in _PATTERNS if pattern.match(asked))


def faults(answer: httpx.Response) -> dict[str, str]:
    """What is wrong with an answer or with any event of its stream, each with an example."""
    operation = operation_of(answer)
    return {
        f"{operation} {answer.status_code}: {fault}": data
        for kind, data in _bodies(ANSWERS[operation], answer)
        for fault in problems(kind, data)
    }


def _bodies(answers: Answers, answer: httpx.Response) -> Iterator[tuple[Any, str]]:
    """Each JSON of an answer, and what it has to be."""
    error = MessagesError if is_messages(answer.request.url.path) else ErrorBody
    if answer.status_code != 200:
        yield error, answer.text
    elif not answer.headers["content-type"].startswith("text/event-stream"):
        yield answers.whole, answer.text
    else:
        data = re.findall(r"^data: (.+)$", answer.text, re.MULTILINE)
        for one in data:
            is_error = one.startswith(('{"error"', '{"type":"error"'))
            if one != "[DONE]":
                yield error if is_error else answers.event, one

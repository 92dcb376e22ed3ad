"""/admin/v1/dead-letters: the jobs that were dead-lettered, for operators."""

import base64
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Literal

import msgspec
from fastapi import APIRouter, Path, Query, Response
from msgspec import Struct
from starlette.exceptions import HTTPException

from gateway.api.openapi import answered
from gateway.api.routes import json_response
from gateway.wiring import Gateway
from shared import dead_letters
from shared.dead_letters import DeadLetter
from shared.errors import InvalidRequest

_MAX_LETTERS = 100
"""Letters with their bodies are held in memory while they are listed."""
_MAX_BODY = 1 << 18
_LETTER_ID = Path(description="The id of the dead letter, as the list shows it.")


class DeadLetterStatus(Struct, frozen=True, kw_only=True):
    id: str
    """The request id of the job; for a message without a request id, its message id or a hash."""
    model: str
    tenant: str
    """The tenant of the job, or else of the user; empty without a tenant."""
    user: str
    """The broker's user that published the message; empty if it does not say."""
    reason: str
    queue: str
    """The queue that the job was dead-lettered from."""
    age_s: float | None
    """Seconds since the job was created; if it does not say, since the message was published or
    dead-lettered."""
    num_bytes: int
    can_retry: bool
    """Whether it can be returned to its queue; otherwise it can only be dropped."""


class DeadLetterList(Struct, frozen=True, kw_only=True):
    data: Sequence[DeadLetterStatus]
    """The oldest dead letters."""


class DeadLetterBody(Struct, frozen=True, kw_only=True):
    id: str
    content_type: str
    """The content type in the properties of the message."""
    format: Literal["json", "text", "base64"]
    """How `body` is written. A body in MessagePack is translated to JSON."""
    body: str
    """Its first 262,144 characters at most."""
    is_truncated: bool


class SettledLetter(Struct, frozen=True, kw_only=True):
    id: str
    status: Literal["retried", "dropped"]


class DroppedLetters(Struct, frozen=True, kw_only=True):
    status: Literal["dropped"]
    num_letters: int
    """Dead letters that were dropped."""


_SETTLED = {"responses": {"200": answered(SettledLetter)}}


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/admin/v1/dead-letters", tags=["operators"])
    lock = gateway.listing_letters

    @routes.get("", openapi_extra={"responses": {"200": answered(DeadLetterList)}})
    async def list_dead_letters(
        limit: int = Query(_MAX_LETTERS, ge=1, le=_MAX_LETTERS, description="How many at most."),
    ) -> Response:
        """List the oldest jobs that were dead-lettered."""
        async with lock, _opened(gateway, limit) as letters:
            return json_response(DeadLetterList(data=[_letter(letter) for letter in letters]))

    @routes.delete("", openapi_extra={"responses": {"200": answered(DroppedLetters)}})
    async def drop_dead_letters() -> Response:
        """Permanently remove all dead letters."""
        async with lock:
            num_letters = await dead_letters.drop_all(gateway.bus)
        return json_response(DroppedLetters(status="dropped", num_letters=num_letters))

    @routes.post("/{letter_id:path}/retry", openapi_extra=_SETTLED)
    async def retry_dead_letter(letter_id: str = _LETTER_ID) -> Response:
        """Return a job to the queue that it was dead-lettered from, without its deadline."""
        async with lock, _opened(gateway) as letters:
            await _found(letters, letter_id).retry(gateway.bus)
        return json_response(SettledLetter(id=letter_id, status="retried"))

    @routes.get("/{letter_id:path}", openapi_extra={"responses": {"200": answered(DeadLetterBody)}})
    async def read_dead_letter(letter_id: str = _LETTER_ID) -> Response:
        """Show the body of a dead letter, which contains the prompt."""
        async with lock, _opened(gateway) as letters:
            return json_response(_body(_found(letters, letter_id)))

    @routes.delete("/{letter_id:path}", openapi_extra=_SETTLED)
    async def drop_dead_letter(letter_id: str = _LETTER_ID) -> Response:
        """Permanently remove a dead letter."""
        async with lock, _opened(gateway) as letters:
            await _found(letters, letter_id).drop()
        return json_response(SettledLetter(id=letter_id, status="dropped"))

    return routes


def _opened(
    gateway: Gateway, limit: int = _MAX_LETTERS
) -> AbstractAsyncContextManager[list[DeadLetter]]:
    return dead_letters.opened(gateway.bus, limit, gateway.settings.trusted_users)


def _found(letters: list[DeadLetter], letter_id: str) -> DeadLetter:
    try:
        return dead_letters.find(letters, letter_id)
    except InvalidRequest:
        raise HTTPException(404, "There is no such dead letter.") from None


def _letter(letter: DeadLetter) -> DeadLetterStatus:
    return DeadLetterStatus(
        id=letter.request_id,
        model=letter.model,
        tenant=letter.tenant,
        user=letter.message.user_id,
        reason=letter.reason,
        queue=letter.queue,
        age_s=letter.age_s,
        num_bytes=len(letter.message.body),
        can_retry=letter.can_retry,
    )


def _body(letter: DeadLetter) -> DeadLetterBody:
    form, text = _readable(letter.message.body)
    return DeadLetterBody(
        id=letter.request_id,
        content_type=letter.message.content_type,
        format=form,
        body=text[:_MAX_BODY],
        is_truncated=len(text) > _MAX_BODY,
    )


def _readable(body: bytes) -> tuple[Literal["json", "text", "base64"], str]:
    """The body as text, whatever its publisher has sent."""
    with suppress(msgspec.DecodeError):
        return "json", msgspec.json.format(body, indent=2).decode()
    with suppress(msgspec.DecodeError, msgspec.ValidationError, TypeError, ValueError):
        content = msgspec.msgpack.decode(body)
        if isinstance(content, dict | list):
            return "json", msgspec.json.format(msgspec.json.encode(content), indent=2).decode()
    try:
        return "text", body.decode()
    except UnicodeDecodeError:
        return "base64", base64.b64encode(body).decode()

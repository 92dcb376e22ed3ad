"""/admin/v1/sessions: operators end sessions of people who have signed in to the console."""

import time

from fastapi import APIRouter, Path, Request, Response
from msgspec import Struct

from gateway.api.openapi import answered
from gateway.api.routes import json_response
from gateway.intake.keys.api_key import ApiKey
from gateway.sign_in.endings import EVERYONE, person_named
from gateway.wiring import Gateway
from shared.errors import Conflict
from shared.telemetry import audit

_PERSON = Path(
    min_length=1,
    max_length=128,
    description="The name or the id of a person, as the audit log has them in `person` and "
    "`key_id`.",
)


class EndedSessions(Struct, frozen=True, kw_only=True):
    person: str | None
    """Whose sessions have ended; null for everyone's."""
    ended_at: float
    """Unix time in seconds. The sessions that began before have ended."""


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/admin/v1/sessions", tags=["operators"])

    @routes.delete("", openapi_extra={"responses": {"200": answered(EndedSessions)}})
    async def end_all_sessions(request: Request) -> Response:
        """End all sessions of the console, at this gateway at once and at the others within
        seconds. People can sign in again."""
        return await _end(gateway, request, None)

    @routes.delete("/{person:path}", openapi_extra={"responses": {"200": answered(EndedSessions)}})
    async def end_sessions(request: Request, person: str = _PERSON) -> Response:
        """End the sessions of one person, like all sessions."""
        return await _end(gateway, request, person)

    return routes


async def _end(gateway: Gateway, request: Request, person: str | None) -> Response:
    if gateway.sign_in is None:
        raise Conflict("Nobody can sign in at this gateway, which has no WARREN_OIDC_FILE.")
    caller: ApiKey = request.state.caller
    ended = EndedSessions(person=person, ended_at=time.time())
    audit.record(
        "sessions ended",
        tenant=caller.tenant,
        key_id=caller.key_id,
        person=caller.person,
        of_person=person or "everyone",
    )
    await gateway.sign_in.endings.end(EVERYONE if person is None else person_named(person))
    return json_response(ended)

"""/console/sign-in: people sign in to the console with an OpenID provider, and sign out.

All answers of a sign-in lead to the console's own page, which says why a sign-in did not succeed.
"""

from contextlib import suppress

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse
from msgspec import Struct

from gateway.api.routes import json_response
from gateway.sign_in.access import Person
from gateway.sign_in.signing_in import BEGIN_S, CALLBACK_PATH, NotSignedIn, SignIn
from gateway.wiring import Gateway
from shared.errors import PermissionDenied, Unavailable
from shared.telemetry import audit

_VIEW = Query("chat", max_length=32, pattern="^[a-z-]+$")
_NOT_STORED = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class ConsoleSession(Struct, frozen=True, kw_only=True):
    sign_in_url: str | None
    """Where a browser signs in; None if this gateway has no OpenID provider."""
    person: str | None
    """Who has signed in; None if nobody has."""


def install(app: FastAPI, gateway: Gateway) -> None:
    """Serve the paths of the console that are about sessions."""
    sign_in = gateway.sign_in
    if sign_in is not None:
        _install_sign_in(app, gateway, sign_in)

    @app.get("/console/session", include_in_schema=False)
    async def show_session(request: Request) -> Response:
        if sign_in is None:
            return json_response(ConsoleSession(sign_in_url=None, person=None))
        person = None
        with suppress(Unavailable):  # the console's requests are answered so, too
            person = sign_in.person_of(request.headers.get("cookie", ""))
        url = f"{sign_in.access.origin}/console/sign-in"
        name = None if person is None else person.name
        session = ConsoleSession(sign_in_url=url, person=name)
        response = json_response(session)
        response.headers.update(_NOT_STORED)
        return response


def _install_sign_in(app: FastAPI, gateway: Gateway, sign_in: SignIn) -> None:
    @app.get("/console/sign-in", include_in_schema=False)
    async def begin(request: Request, view: str = _VIEW) -> Response:
        try:
            page, begun = await sign_in.begin(view)
        except NotSignedIn as error:
            return _refused(gateway, request, error)
        response = _redirect(page)
        _keep(response, sign_in, sign_in.begun_cookie, begun, BEGIN_S, is_strict=False)
        return response

    @app.get(CALLBACK_PATH, include_in_schema=False)
    async def come_back(request: Request) -> Response:
        begun = request.cookies.get(sign_in.begun_cookie, "")
        try:
            person, session, view = await sign_in.complete(request.query_params, begun)
        except NotSignedIn as error:
            response = _refused(gateway, request, error)
        else:
            _record("signed in", request, sign_in, person)
            response = _redirect(f"/#{view}")
            name = sign_in.session_cookie
            _keep(response, sign_in, name, session, sign_in.session_s, is_strict=True)
        _keep(response, sign_in, sign_in.begun_cookie, "", 0, is_strict=False)
        return response

    @app.post("/console/sign-out", include_in_schema=False)
    async def sign_out(request: Request) -> Response:
        if not sign_in.is_own(request.headers):
            raise PermissionDenied("Only the console's own page may end a session.")
        session = sign_in.session_of(request.headers.get("cookie", ""))
        if session is not None:
            _record("signed out", request, sign_in, session.person)
            with suppress(Unavailable):  # the other gateways hear of it when the database is back
                await sign_in.endings.end(session.subject)
        response = Response(status_code=204, headers=_NOT_STORED)
        _keep(response, sign_in, sign_in.session_cookie, "", 0, is_strict=True)
        return response


def _redirect(url: str) -> Response:
    return RedirectResponse(url, status_code=303, headers=_NOT_STORED)


def _refused(gateway: Gateway, request: Request, error: NotSignedIn) -> Response:
    fields = {"outcome": error.outcome, "reason": str(error), **_fields(request)}
    gateway.refusals.record("login refused", tenant="", key_id="", person="", **fields)
    return _redirect(f"/#sign-in-{error.outcome}")


def _keep(
    response: Response, sign_in: SignIn, name: str, value: str, seconds: int, *, is_strict: bool
) -> None:
    """Set a cookie that no script can read. A strict cookie is not sent when a browser comes from
    another site."""
    response.set_cookie(
        name,
        value,
        max_age=seconds,
        path="/",
        secure=sign_in.access.is_secure,
        httponly=True,
        samesite="strict" if is_strict else "lax",
    )


def _record(act: audit.Act, request: Request, sign_in: SignIn, person: Person) -> None:
    tenant = sign_in.access.roles[person.role].tenant
    fields = {"role": person.role, **_fields(request)}
    audit.record(act, tenant=tenant, key_id=person.id, person=person.name, **fields)


def _fields(request: Request) -> dict[str, object]:
    client = request.client
    address = client.host if client else ""
    return {"path": request.url.path, "address": address, "request_id": request.state.request_id}

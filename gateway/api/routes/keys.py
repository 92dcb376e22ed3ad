"""/admin/v1/keys: the API keys of the database, which operators manage. Keys of the file are only
listed."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from msgspec import Meta, Struct

from gateway.api.bodies.parsing import Body, refused
from gateway.api.openapi import answered, documented
from gateway.api.routes import body_of, json_response
from gateway.intake.keys.api_key import (
    DEFAULT_SCOPES,
    SETTABLE,
    ApiKey,
    Cache,
    Scope,
    read_options,
)
from gateway.intake.keys.tenant_limits import Limit
from gateway.wiring import Gateway
from shared.errors import InvalidRequest
from shared.settings import DAY_S
from shared.telemetry import audit

_KEY_ID = Path(max_length=64, description="The id of the key, which is the second part of it.")
_MAX_GRACE_S = 87_600 * 3600
_MAX_ITEMS = 256
_ANY_TENANT = Query(None, max_length=128, description="Those of one tenant only.")

Text = Annotated[str, Meta(max_length=128)]
Models = Annotated[
    tuple[Text, ...],
    Meta(max_length=_MAX_ITEMS, description="Names of models or patterns with `*`; empty: all."),
]
Expiry = Annotated[
    str,
    Meta(max_length=64, description="A date or a time in ISO 8601, in UTC, such as `2027-01-31`."),
]


class _KeyFields(Body, frozen=True, kw_only=True):
    label: Text | None = None
    expires: Expiry | None = None
    scopes: Annotated[tuple[Scope, ...], Meta(max_length=_MAX_ITEMS)] | None = None
    models: Models | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent: Limit | None = None
    max_detached: Limit | None = None
    max_tokens: Limit | None = None
    receipts: Annotated[bool, Meta(description="Whether all answers have a receipt.")] | None = None
    cache: (
        Annotated[Literal["exact"], Meta(description="`exact`: equal requests are computed once.")]
        | None
    ) = None

    def options(self) -> dict[str, Any]:
        """The fields of `ApiKey` that are given. Raises `InvalidRequest`."""
        given = {name: getattr(self, name) for name in SETTABLE}
        texts = {name: _as_text(value) for name, value in given.items() if value is not None}
        try:
            options = read_options(texts)
        except ValueError as error:
            raise InvalidRequest(str(error), param=str(error).partition("=")[0]) from None
        if "expires" in options and options["expires"] <= datetime.now(UTC):
            raise refused("expires", "in the past, so the key would not be valid.")
        return options


class NewKey(_KeyFields, frozen=True, kw_only=True):
    """The body of ``POST /admin/v1/keys``."""

    tenant: Annotated[Text, Meta(description="The tenant that the key belongs to.")]


class KeyChanges(_KeyFields, frozen=True, kw_only=True):
    """The body of ``POST /admin/v1/keys/{key_id}``."""

    unset: Annotated[
        tuple[
            Literal[
                "label",
                "expires",
                "scopes",
                "models",
                "requests_per_minute",
                "tokens_per_minute",
                "max_concurrent",
                "max_detached",
                "max_tokens",
                "receipts",
                "cache",
            ],
            ...,
        ],
        Meta(max_length=_MAX_ITEMS, description="Fields that are reset: a limit that ends."),
    ] = ()


class KeyRotation(Body, frozen=True, kw_only=True):
    """The body of ``POST /admin/v1/keys/{key_id}/rotate``."""

    grace_seconds: Annotated[
        int,
        Meta(ge=0, le=_MAX_GRACE_S, description="Seconds for which the old key remains valid."),
    ] = int(DAY_S)


class KeyDescription(Struct, frozen=True, kw_only=True, tag_field="object", tag="api_key"):
    """A key without its secret. A limit of null is no limit."""

    id: str
    tenant: str
    source: Literal["database", "file"]
    """Only keys of the database can be changed over HTTP."""
    created: str
    label: str
    expires_at: float | None
    """Unix time in seconds."""
    is_expired: bool
    scopes: Sequence[Scope]
    models: Sequence[str]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrent: int | None
    max_detached: int | None
    max_tokens: int | None
    receipts: bool
    cache: Cache


class KeyWithSecret(KeyDescription, frozen=True, kw_only=True, tag="api_key"):
    key: str
    """Shown this once."""


class KeyList(Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """All keys in force, in a single page."""

    data: Sequence[KeyDescription]


class RevokedKey(Struct, frozen=True, kw_only=True, tag_field="object", tag="api_key.deleted"):
    id: str
    tenant: str
    deleted: bool = True


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/admin/v1/keys", tags=["operators"])
    example: Mapping[str, Any] = {"tenant": "alice", "label": "Web app", "tokens_per_minute": 60000}

    @routes.get("", openapi_extra={"responses": {"200": answered(KeyList)}})
    async def list_keys(tenant: str | None = _ANY_TENANT) -> Response:
        """List the API keys of the file and of the database."""
        known = [key for key in gateway.keys.known if tenant in (None, key.tenant)]
        return json_response(KeyList(data=[_described(gateway, key) for key in known]))

    @routes.post("", openapi_extra=documented(NewKey, example, KeyWithSecret, streams=False))
    async def create_key(request: Request) -> Response:
        """Create an API key in the database. The answer has the key, which is not shown again."""
        body = await body_of(gateway, request, NewKey)
        try:
            secret, key = await gateway.key_directory.add(body.tenant, body.options())
        except ValueError as error:
            raise InvalidRequest(str(error), param="tenant") from None
        _record("API key added", request, key)
        return json_response(_with_secret(gateway, key, secret))

    @routes.post(
        "/{key_id}",
        openapi_extra=documented(KeyChanges, {"max_tokens": 500}, KeyDescription, streams=False),
    )
    async def change_key(request: Request, key_id: str = _KEY_ID) -> Response:
        """Change the label, the expiry, the scopes, the models or the limits of a key. Fields that
        the body leaves out stay as they are."""
        body = await body_of(gateway, request, KeyChanges)
        options: dict[str, Any] = {name: _DEFAULTS[name] for name in body.unset}
        options |= body.options()
        if not options:
            raise refused("body", "expected a field that is to be changed.")
        key = await gateway.key_directory.change(key_id, options)
        _record("API key changed", request, key, fields=sorted(options))
        return json_response(_described(gateway, key))

    @routes.post(
        "/{key_id}/rotate", openapi_extra=documented(KeyRotation, {}, KeyWithSecret, streams=False)
    )
    async def rotate_key(request: Request, key_id: str = _KEY_ID) -> Response:
        """Replace a key by a new key with the same id, limits and expiry."""
        body = await body_of(gateway, request, KeyRotation)
        grace = timedelta(seconds=body.grace_seconds)
        secret, key = await gateway.key_directory.rotate(key_id, grace)
        _record("API key rotated", request, key)
        return json_response(_with_secret(gateway, key, secret))

    @routes.delete("/{key_id}", openapi_extra={"responses": {"200": answered(RevokedKey)}})
    async def revoke_key(request: Request, key_id: str = _KEY_ID) -> Response:
        """Revoke a key, at this gateway at once and at the others within seconds."""
        key = await gateway.key_directory.revoke(key_id)
        _record("API key revoked", request, key)
        return json_response(RevokedKey(id=key_id, tenant=key.tenant))

    return routes


def _as_text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


_SAME = ("tenant", "created", *(name for name in SETTABLE if name != "expires"))
_DEFAULTS: Mapping[str, Any] = {
    name: DEFAULT_SCOPES if name == "scopes" else () if name == "models" else None
    for name in SETTABLE
} | {"label": "", "receipts": False, "cache": ""}


def _described(gateway: Gateway, key: ApiKey) -> KeyDescription:
    expires = key.expires
    return KeyDescription(
        id=key.key_id,
        source="file" if gateway.keys.is_in_file(key.key_id) else "database",
        expires_at=None if expires is None else expires.timestamp(),
        is_expired=expires is not None and expires <= datetime.now(UTC),
        **{name: getattr(key, name) for name in _SAME},
    )


def _with_secret(gateway: Gateway, key: ApiKey, secret: str) -> KeyWithSecret:
    return KeyWithSecret(**msgspec.structs.asdict(_described(gateway, key)), key=secret)


def _record(act: audit.Act, request: Request, key: ApiKey, **facts: object) -> None:
    caller: ApiKey = request.state.caller
    by = {"by_tenant": caller.tenant, "by_key_id": caller.key_id}
    fields = {**by, **facts}
    audit.record(act, tenant=key.tenant, key_id=key.key_id, person=caller.person, **fields)

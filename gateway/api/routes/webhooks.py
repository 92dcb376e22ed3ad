"""/admin/v1/webhooks: the endpoints that operators set up for tenants, in the form of OpenAI's
webhook endpoints. `gateway.webhooks` delivers to them."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from msgspec import Meta, Struct

from gateway.api.bodies.parsing import Body, refused
from gateway.api.openapi import answered, documented
from gateway.api.routes import body_of, json_response
from gateway.store.webhooks import (
    EVENT_TYPES,
    OVERLAP_S,
    EventType,
    Webhook,
    WebhookDelivery,
    Webhooks,
)
from gateway.webhooks.sending import MAX_URL_CHARS, NotSent, check_url, is_success
from gateway.wiring import Gateway
from shared.errors import InvalidRequest

_URL = "https://example.com/webhooks"
_MAX_DEAD = 100
_HINT_CHARS = 4
_WEBHOOK_ID = Path(description="The `id` of the webhook.")
_DELIVERY_ID = Path(description="The `id` of the dead delivery.")

Name = Annotated[str, Meta(max_length=128)]
Url = Annotated[str, Meta(max_length=MAX_URL_CHARS)]
_MAX_TYPES = 64
EventTypes = Annotated[
    tuple[EventType, ...], Meta(max_length=_MAX_TYPES, description="Left out: all.")
]


class NewWebhook(Body, frozen=True, kw_only=True):
    """The body of ``POST /admin/v1/webhooks``."""

    url: Url
    tenant: Annotated[
        Name, Meta(description="Whose events are sent; empty: those without an API key.")
    ] = ""
    name: Name = ""
    event_types: EventTypes = EVENT_TYPES


class WebhookChanges(Body, frozen=True, kw_only=True):
    """The body of ``POST /admin/v1/webhooks/{webhook_id}``."""

    url: Url | None = None
    name: Name | None = None
    event_types: Annotated[tuple[EventType, ...], Meta(max_length=_MAX_TYPES)] | None = None


class Rotation(Body, frozen=True, kw_only=True):
    """The body of ``POST /admin/v1/webhooks/{webhook_id}/rotate_secret``."""

    keep_old_secret_active_for_24_hours: bool = False


class TestOrder(Body, frozen=True, kw_only=True):
    """The body of ``POST /admin/v1/webhooks/{webhook_id}/test``."""

    event_type: EventType


class WebhookStatus(Struct, frozen=True, kw_only=True, tag_field="object", tag="webhook_endpoint"):
    id: str
    name: str
    tenant: str
    url: str
    event_types: Sequence[str]
    created_at: int
    updated_at: int
    signing_secret_hint: str


class WebhookWithSecret(WebhookStatus, frozen=True, kw_only=True, tag="webhook_endpoint"):
    signing_secret: str
    """Shown this once."""


class WebhookList(Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """All endpoints, in a single page."""

    data: Sequence[WebhookStatus]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


class DeletedWebhook(Struct, frozen=True, tag_field="object", tag="webhook_endpoint.deleted"):
    id: str
    deleted: bool = True


class TestResult(
    Struct, frozen=True, kw_only=True, tag_field="object", tag="webhook_endpoint.test"
):
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    """That of the endpoint's answer."""
    success: bool
    """Whether the endpoint accepted the event, as any status from 200 to 299 says."""


class DeadDelivery(Struct, frozen=True, kw_only=True):
    id: str
    webhook_id: str
    tenant: str
    url: str
    event_id: str
    type: str
    object_id: str
    """The id of the batch or the response."""
    created_at: int
    num_tries: int
    reason: str
    """Why the last try failed."""


class DeadDeliveryList(Struct, frozen=True):
    data: Sequence[DeadDelivery]
    """The oldest dead deliveries."""


class Retried(Struct, frozen=True):
    id: str
    status: Literal["retried"] = "retried"


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/admin/v1/webhooks", tags=["operators"])
    example: Mapping[str, Any] = {"url": _URL, "tenant": "acme"}
    _add_dead_deliveries(routes, gateway)  # before the paths with an id

    @routes.get("", openapi_extra={"responses": {"200": answered(WebhookList)}})
    async def list_webhooks(
        tenant: str | None = Query(None, description="Those of one tenant only."),
    ) -> Response:
        """List webhooks, oldest first."""
        found = await (await _stored(gateway)).all(tenant)
        return json_response(
            WebhookList(
                data=[_described(webhook) for webhook in found],
                first_id=found[0].id if found else None,
                last_id=found[-1].id if found else None,
            )
        )

    @routes.post("", openapi_extra=_document(NewWebhook, example, WebhookWithSecret))
    async def create_webhook(request: Request) -> Response:
        """Send the events of a tenant to a URL. The answer has the secret, which is not shown
        again."""
        body = await body_of(gateway, request, NewWebhook)
        check_url(body.url, gateway.settings.webhook_networks)
        webhook = await (await _stored(gateway)).add(
            tenant=body.tenant, name=body.name, url=body.url, event_types=body.event_types
        )
        return json_response(_with_secret(webhook))

    @routes.get("/{webhook_id}", openapi_extra={"responses": {"200": answered(WebhookStatus)}})
    async def get_webhook(webhook_id: str = _WEBHOOK_ID) -> Response:
        """Describe a webhook."""
        return json_response(_described(await (await _stored(gateway)).get(webhook_id)))

    @routes.post(
        "/{webhook_id}", openapi_extra=_document(WebhookChanges, {"url": _URL}, WebhookStatus)
    )
    async def change_webhook(request: Request, webhook_id: str = _WEBHOOK_ID) -> Response:
        """Change the URL, the name or the event types of a webhook. Pending events go to the new
        URL."""
        body = await body_of(gateway, request, WebhookChanges)
        said = msgspec.structs.asdict(body)
        changes = {name: value for name, value in said.items() if value is not None}
        if not changes:
            raise refused("body", "expected url, name or event_types.")
        if body.url is not None:
            check_url(body.url, gateway.settings.webhook_networks)
        return json_response(
            _described(await (await _stored(gateway)).change(webhook_id, **changes))
        )

    @routes.delete("/{webhook_id}", openapi_extra={"responses": {"200": answered(DeletedWebhook)}})
    async def remove_webhook(webhook_id: str = _WEBHOOK_ID) -> Response:
        """Remove a webhook, and its undelivered events."""
        await (await _stored(gateway)).remove(webhook_id)
        return json_response(DeletedWebhook(webhook_id))

    _add_operations(routes, gateway)
    return routes


def _add_operations(routes: APIRouter, gateway: Gateway) -> None:
    @routes.post(
        "/{webhook_id}/rotate_secret", openapi_extra=_document(Rotation, {}, WebhookWithSecret)
    )
    async def rotate_secret(request: Request, webhook_id: str = _WEBHOOK_ID) -> Response:
        """Replace the secret of a webhook. Events are signed with both secrets while the old secret
        stays active."""
        body = await body_of(gateway, request, Rotation)
        overlap_s = OVERLAP_S if body.keep_old_secret_active_for_24_hours else 0
        return json_response(
            _with_secret(await (await _stored(gateway)).rotate(webhook_id, overlap_s=overlap_s))
        )

    @routes.post(
        "/{webhook_id}/test",
        openapi_extra=_document(TestOrder, {"event_type": "batch.completed"}, TestResult),
    )
    async def send_test(request: Request, webhook_id: str = _WEBHOOK_ID) -> Response:
        """Send a sample event at once, without further tries."""
        body = await body_of(gateway, request, TestOrder)
        sample = _sample(await (await _stored(gateway)).get(webhook_id), body.event_type)
        try:
            status = await gateway.deliverer.sender.send(sample)
        except NotSent as error:
            raise InvalidRequest(f"The endpoint did not answer: {error}.", param="url") from None
        return json_response(
            TestResult(
                webhook_endpoint_id=webhook_id,
                event_type=body.event_type,
                status_code=status,
                success=is_success(status),
            )
        )


def _add_dead_deliveries(routes: APIRouter, gateway: Gateway) -> None:
    @routes.get("/dead", openapi_extra={"responses": {"200": answered(DeadDeliveryList)}})
    async def list_dead_deliveries(
        limit: int = Query(_MAX_DEAD, ge=1, le=_MAX_DEAD, description="How many at most."),
    ) -> Response:
        """List the oldest deliveries that have failed too often."""
        dead = await (await _stored(gateway)).dead(limit)
        return json_response(DeadDeliveryList([_dead(delivery) for delivery in dead]))

    @routes.post(
        "/dead/{delivery_id}/retry", openapi_extra={"responses": {"200": answered(Retried)}}
    )
    async def retry_dead_delivery(delivery_id: str = _DELIVERY_ID) -> Response:
        """Try a dead delivery again, as often as a new delivery."""
        await (await _stored(gateway)).retry(delivery_id)
        return json_response(Retried(delivery_id))


async def _stored(gateway: Gateway) -> Webhooks:
    return (await gateway.store.open()).webhooks


def _document(kind: type[Body], example: Mapping[str, Any], answer: type[Struct]) -> dict[str, Any]:
    return documented(kind, example, answer, streams=False)


def _described(webhook: Webhook) -> WebhookStatus:
    return WebhookStatus(**_fields(webhook))


def _with_secret(webhook: Webhook) -> WebhookWithSecret:
    return WebhookWithSecret(**_fields(webhook), signing_secret=webhook.secret)


def _fields(webhook: Webhook) -> dict[str, Any]:
    same = {name: getattr(webhook, name) for name in _SAME}
    return {**same, "signing_secret_hint": f"…{webhook.secret[-_HINT_CHARS:]}"}


_SAME = frozenset(WebhookStatus.__struct_fields__) - {"signing_secret_hint"}


def _sample(webhook: Webhook, event_type: EventType) -> WebhookDelivery:
    return WebhookDelivery(
        id="",
        event_id=f"evt_{secrets.token_hex(16)}",
        type=event_type,
        object_id=f"{event_type.partition('.')[0]}_test",
        created_at=int(time.time()),
        num_tries=1,
        reason=None,
        webhook=webhook,
    )


def _dead(delivery: WebhookDelivery) -> DeadDelivery:
    return DeadDelivery(
        id=delivery.id,
        webhook_id=delivery.webhook.id,
        tenant=delivery.webhook.tenant,
        url=delivery.webhook.url,
        event_id=delivery.event_id,
        type=delivery.type,
        object_id=delivery.object_id,
        created_at=delivery.created_at,
        num_tries=delivery.num_tries,
        reason=delivery.reason or "",
    )

"""/admin/v1/tenants: what operators do with tenants."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Request, Response
from msgspec import Meta, Struct

from gateway.api.bodies.parsing import Body, refused
from gateway.api.openapi import answered, documented
from gateway.api.routes import body_of, json_response
from gateway.intake.keys.api_key import TENANT, ApiKey
from gateway.intake.keys.tenant_limits import NO_LIMITS, Limit, TenantLimits
from gateway.ledger.budgets import LONGEST_MONTH_S
from gateway.wiring import Gateway
from shared.errors import Conflict, Unavailable
from shared.settings import DAY_S
from shared.telemetry import audit

_TENANT = Path(max_length=128, pattern=f"^{TENANT.pattern}$", description="The name of the tenant.")
_MAX_SHOWN = 5
_MAX_ITEMS = 16
_NUM_DECIMALS = 6


Money = Annotated[
    float,
    Meta(gt=0, le=1e12, description="For a calendar month in UTC, in the currency of the prices."),
]


class TenantChanges(Body, frozen=True, kw_only=True):
    """The body of ``POST /admin/v1/tenants/{tenant}``."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent: Limit | None = None
    max_detached: Limit | None = None
    monthly_budget: Money | None = None
    unset: Annotated[
        tuple[
            Literal[
                "requests_per_minute",
                "tokens_per_minute",
                "max_concurrent",
                "max_detached",
                "monthly_budget",
            ],
            ...,
        ],
        Meta(max_length=_MAX_ITEMS, description="Limits that end."),
    ] = ()

    def changes(self) -> dict[str, Any]:
        """The limits that are different afterwards. Raises `InvalidRequest`."""
        given = {name: getattr(self, name) for name in TenantLimits.__struct_fields__}
        changes: dict[str, Any] = dict.fromkeys(self.unset)
        changes |= {name: value for name, value in given.items() if value is not None}
        if self.monthly_budget is not None:
            changes["monthly_budget"] = Decimal(str(self.monthly_budget))
        if not changes:
            raise refused("body", "expected a limit that is to be changed.")
        return changes


class TenantDescription(Struct, frozen=True, kw_only=True, tag_field="object", tag="tenant"):
    """A tenant with its limits, and the use of all its API keys at all gateways. A limit of null is
    no limit, and the use of a tenant without limits is not counted: it is null."""

    tenant: str
    num_keys: int
    """API keys in force."""
    requests_per_minute: int | None
    num_requests: int | None
    """Requests of the last minute."""
    tokens_per_minute: int | None
    num_tokens: int | None
    """Tokens of the last minute."""
    max_concurrent: int | None
    num_running: int | None
    """Requests in flight."""
    max_detached: int | None
    monthly_budget: float | None
    """For a calendar month in UTC, in the currency of the prices."""
    spent: float | None
    """In this month."""


class TenantList(Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """The tenants that have API keys or limits, in a single page."""

    data: Sequence[TenantDescription]


class ErasedTenant(Struct, frozen=True, kw_only=True):
    tenant: str
    num_rows: Mapping[str, int]
    """Rows of the database that were deleted, by table. Each of `files` had bytes in the storage of
    files, which are deleted, too."""
    num_logs: int
    """Requests whose logs the broker was told to delete."""
    num_dead_letters: int
    """Dead letters that were dropped."""


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/admin/v1/tenants", tags=["operators"])

    @routes.get("", openapi_extra={"responses": {"200": answered(TenantList)}})
    async def list_tenants() -> Response:
        """List the tenants that have API keys or limits."""
        with_limits = (tenant for tenant, one in gateway.keys.tenants.items() if one != NO_LIMITS)
        names = {*(key.tenant for key in gateway.keys.known), *with_limits}
        return json_response(TenantList(data=[_described(gateway, name) for name in sorted(names)]))

    @routes.get("/{tenant}", openapi_extra={"responses": {"200": answered(TenantDescription)}})
    async def get_tenant(tenant: str = _TENANT) -> Response:
        """Show the limits of a tenant, and its current use."""
        return json_response(_described(gateway, tenant))

    @routes.post(
        "/{tenant}",
        openapi_extra=documented(
            TenantChanges, {"tokens_per_minute": 500000}, TenantDescription, streams=False
        ),
    )
    async def change_limits(request: Request, tenant: str = _TENANT) -> Response:
        """Change the limits that all API keys of a tenant have together. Fields that the body
        leaves out stay as they are."""
        changes = (await body_of(gateway, request, TenantChanges)).changes()
        if changes.get("monthly_budget") is not None:
            _require_costs(gateway)
        await gateway.key_directory.limit(tenant, changes)
        with suppress(Unavailable):  # the answer then says what was known before
            await gateway.budgets.look()
        limits = {name: one and float(one) for name, one in changes.items()}
        _record("tenant limits changed", request, limited_tenant=tenant, limits=limits)
        return json_response(_described(gateway, tenant))

    @routes.delete("/{tenant}", openapi_extra={"responses": {"200": answered(ErasedTenant)}})
    async def erase_tenant(request: Request, tenant: str = _TENANT) -> Response:
        """Permanently delete all stored data of a tenant, and cancel its work. Its API keys must be
        revoked before. The next erasure completes an interrupted erasure."""
        await gateway.key_directory.refresh()
        if key_ids := gateway.erasure.keys_of(tenant):
            raise Conflict(_still_has(tenant, key_ids))
        if gateway.sign_in is not None and (role := gateway.sign_in.access.role_in(tenant)):
            raise Conflict(
                f"People of the tenant {tenant} can sign in with the role {role}. Remove it from "
                "WARREN_OIDC_FILE and start the gateways again."
            )
        erased = await gateway.erasure.erase(tenant)
        answer = ErasedTenant(tenant=tenant, **erased._asdict())
        _record("tenant erased", request, erased_tenant=tenant, **erased._asdict())
        return json_response(answer)

    return routes


def _described(gateway: Gateway, tenant: str) -> TenantDescription:
    limits = gateway.keys.limits_of(tenant)
    use = gateway.limits.use_of_tenant(tenant) if limits.are_counted else None
    budget = gateway.budgets.of(tenant)
    return TenantDescription(
        tenant=tenant,
        num_keys=len(gateway.erasure.keys_of(tenant)),
        num_requests=None if use is None else use.num_requests,
        num_tokens=None if use is None else use.num_tokens,
        num_running=None if use is None else use.num_running,
        spent=None if budget is None else float(round(budget.spent, _NUM_DECIMALS)),
        **{
            **msgspec.structs.asdict(limits),
            "monthly_budget": None if budget is None else float(budget.monthly),
        },
    )


def _require_costs(gateway: Gateway) -> None:
    """Raises `Conflict` if the gateway does not know what a month costs."""
    if not gateway.prices.models:
        raise Conflict("This gateway has no prices for a budget. Set WARREN_PRICES_FILE.")
    if gateway.settings.retention_days.usage * DAY_S < LONGEST_MONTH_S:
        raise Conflict(
            "Usage records are deleted before the month of a budget ends. Set "
            f"usage= in WARREN_RETENTION_DAYS to {LONGEST_MONTH_S / DAY_S:.0f} at least."
        )


def _record(act: audit.Act, request: Request, **facts: object) -> None:
    caller: ApiKey = request.state.caller
    audit.record(act, tenant=caller.tenant, key_id=caller.key_id, person=caller.person, **facts)


def _still_has(tenant: str, key_ids: list[str]) -> str:
    shown = ", ".join(key_ids[:_MAX_SHOWN])
    more = f" and {len(key_ids) - _MAX_SHOWN} more" if len(key_ids) > _MAX_SHOWN else ""
    return f"The tenant {tenant} has API keys in force. Revoke them first: {shown}{more}."

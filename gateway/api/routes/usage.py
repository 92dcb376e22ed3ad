"""GET /v1/usage and /admin/v1/usage: the usage of requests, and its cost."""

import csv
import io
import time
from collections.abc import Collection, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from msgspec import Struct

from gateway.api.bodies.parsing import refused
from gateway.api.openapi import answered
from gateway.api.routes import json_response
from gateway.api.routes.generation import admitted
from gateway.intake.keys.api_key import ApiKey
from gateway.ledger.prices import PricedSum
from gateway.store.usage import GROUPS, MAX_ROWS, Group, require_few_rows
from gateway.wiring import Gateway
from shared.telemetry import audit

_DEFAULT_TIME_S = 30 * 24 * 3600
_MAX_TIME = 1 << 40
_NUM_DECIMALS = 6
_MAX_PRICED_ROWS = 10 * MAX_ROWS
"""Before the rows of several models are added up."""

StartTime = Annotated[
    int | None,
    Query(
        ge=0,
        le=_MAX_TIME,
        description="Unix time from which on the requests ended; 30 days before `end_time` if it "
        "is left out.",
    ),
]
EndTime = Annotated[
    int | None,
    Query(
        ge=0,
        le=_MAX_TIME,
        description="Unix time before which the requests ended; now if it is left out.",
    ),
]
GroupBy = Annotated[
    str,
    Query(
        max_length=64,
        description="What each row is about: any of `tenant`, `key`, `model` and `day`, separated "
        "by commas. Empty: a single row.",
    ),
]
Format = Annotated[Literal["json", "csv"], Query(description="The format of the answer.")]
OfTenant = Annotated[
    str | None, Query(max_length=128, description="Only the requests of this tenant.")
]
ErasedTenant = Annotated[
    str, Query(max_length=128, description="The tenant whose records are deleted.")
]


class UsageRow(Struct, frozen=True, kw_only=True):
    """The usage of requests together. Fields by which they are not grouped are null."""

    tenant: str | None
    api_key_id: str | None
    """Empty for requests without a key. The lines of a batch have the key that created it."""
    model: str | None
    day: str | None
    """In UTC, such as `2026-12-31`."""
    requests: int
    """Requests that ended, whatever their outcome."""
    completed: int
    """Requests that were answered completely."""
    input_tokens: int
    """Tokens of prompts."""
    cached_tokens: int
    """Tokens of prompts that were found in a prefix cache."""
    output_tokens: int
    takeovers: int
    """How often another worker continued a request."""
    queue_seconds: float
    compute_seconds: float
    """Machine time: each step of an engine is divided among the requests in it."""
    cached_answers: int
    """Requests whose answer was computed for another request."""
    cost: float | None
    """In `currency`; null if a model has no price."""


class MonthlyBudget(Struct, frozen=True, kw_only=True):
    """The amount that a tenant may spend in this calendar month, in UTC, and the amount that it has
    spent."""

    monthly_budget: float
    """In `currency`, like `spent`."""
    spent: float
    resets_at: int
    """Unix time."""


class UsageList(Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    data: Sequence[UsageRow]
    start_time: int
    end_time: int
    group_by: Sequence[Group]
    currency: str | None
    """Null if the gateway has no prices."""
    budget: MonthlyBudget | None
    """Null if the report is not about a single tenant, or the tenant has no budget."""


class Erased(Struct, frozen=True, kw_only=True):
    tenant: str
    num_records: int
    """Records that were deleted."""


_LABELS = dict(zip(GROUPS, ("tenant", "api_key_id", "model", "day"), strict=True))
_NUMBERS = [name for name in UsageRow.__struct_fields__ if name not in _LABELS.values()]
_ANSWER = answered(UsageList)
_CSV = {"text/csv": {"schema": {"type": "string"}}}
_RESPONSES = {"responses": {"200": {**_ANSWER, "content": {**_ANSWER["content"], **_CSV}}}}


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/usage", tags=["usage"], openapi_extra=_RESPONSES)
    async def get_usage(
        start_time: StartTime = None,
        end_time: EndTime = None,
        group_by: GroupBy = "model,day",
        format: Format = "json",  # noqa: A002 (the name of the parameter)
    ) -> Response:
        """Sum up the usage of your tenant's requests. A request counts a second after its end."""

        async def answer(request: Request) -> Response:
            tenant = request.state.tenant
            return await _reported(gateway, start_time, end_time, group_by, format, tenant)

        return admitted(gateway, answer)

    @routes.get("/admin/v1/usage", tags=["operators"], openapi_extra=_RESPONSES)
    async def get_usage_of_all(
        start_time: StartTime = None,
        end_time: EndTime = None,
        group_by: GroupBy = "tenant,model",
        format: Format = "json",  # noqa: A002 (the name of the parameter)
        tenant: OfTenant = None,
    ) -> Response:
        """Sum up the usage of all tenants' requests, or of a single tenant's requests."""

        async def answer(_: Request) -> Response:
            return await _reported(gateway, start_time, end_time, group_by, format, tenant)

        return admitted(gateway, answer)

    @routes.delete(
        "/admin/v1/usage",
        tags=["operators"],
        openapi_extra={"responses": {"200": answered(Erased)}},
    )
    async def erase_usage(request: Request, tenant: ErasedTenant) -> Response:
        """Permanently delete all usage records of a tenant."""
        state = await gateway.store.open()
        erased = Erased(tenant=tenant, num_records=await state.usage.erase(tenant))
        caller: ApiKey = request.state.caller
        fields = {"erased_tenant": tenant, "num_records": erased.num_records}
        audit.record(
            "usage records erased",
            tenant=caller.tenant,
            key_id=caller.key_id,
            person=caller.person,
            **fields,
        )
        return json_response(erased)

    return routes


async def _reported(
    gateway: Gateway,
    start_time: int | None,
    end_time: int | None,
    group_by: str,
    form: Literal["json", "csv"],
    tenant: str | None,
) -> Response:
    """Raises `InvalidRequest` and `Unavailable`."""
    groups = _groups(group_by)
    end = int(time.time()) + 1 if end_time is None else end_time
    start = max(0, end - _DEFAULT_TIME_S) if start_time is None else start_time
    if start > end:
        raise refused("start_time", "after end_time.")
    prices, tenants = gateway.prices, None if tenant is None else [tenant]
    state = await gateway.store.open()
    if prices.models:
        # Each model has its price; the rows of several are added up.
        sums = await state.usage.sums(
            {*groups, "model"}, start=start, end=end, tenants=tenants, max_rows=_MAX_PRICED_ROWS
        )
    else:
        sums = await state.usage.sums(groups, start=start, end=end, tenants=tenants)
    rows = [_row(priced) for priced in prices.priced(sums, groups)]
    require_few_rows(len(rows))
    if form == "csv":
        return Response(_as_csv(rows, groups), media_type="text/csv; charset=utf-8")
    report = UsageList(
        data=rows,
        start_time=start,
        end_time=end,
        group_by=groups,
        currency=prices.currency if prices.models else None,
        budget=None if tenant is None else _budget(gateway, tenant),
    )
    return json_response(report)


def _budget(gateway: Gateway, tenant: str) -> MonthlyBudget | None:
    budget = gateway.budgets.of(tenant)
    if budget is None:
        return None
    spent = float(round(budget.spent, _NUM_DECIMALS))
    return MonthlyBudget(
        monthly_budget=float(budget.monthly), spent=spent, resets_at=int(budget.ends_at)
    )


def _groups(group_by: str) -> list[Group]:
    """Raises `InvalidRequest`."""
    names = {name.strip() for name in group_by.split(",") if name.strip()}
    if not names <= set(GROUPS):
        raise refused("group_by", f"expected some of {', '.join(GROUPS)}.")
    return [group for group in GROUPS if group in names]


def _row(priced: PricedSum) -> UsageRow:
    of, used, cost = priced
    return UsageRow(
        tenant=of.get("tenant"),
        api_key_id=of.get("key"),
        model=of.get("model"),
        day=of.get("day"),
        requests=used.num_requests,
        completed=used.num_completed,
        input_tokens=used.num_prompt_tokens,
        cached_tokens=used.num_cached_tokens,
        cached_answers=used.num_cached_answers,
        output_tokens=used.num_output_tokens,
        takeovers=used.num_takeovers,
        queue_seconds=round(used.queue_s, _NUM_DECIMALS),
        compute_seconds=round(used.compute_s, _NUM_DECIMALS),
        cost=None if cost is None else float(round(cost, _NUM_DECIMALS)),
    )


def _as_csv(rows: Sequence[UsageRow], groups: Collection[Group]) -> str:
    columns = [*(_LABELS[group] for group in groups), *_NUMBERS]
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([_cell(getattr(row, column)) for column in columns] for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    """Spreadsheets read small numbers wrongly in Python's notation."""
    return f"{value:.{_NUM_DECIMALS}f}" if isinstance(value, float) else value

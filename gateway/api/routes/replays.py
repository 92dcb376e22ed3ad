"""/v1/replays and /admin/v1/replays: the reports of `warren replay`, which operators see."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec import Meta, Struct

from gateway.api.bodies.parsing import Body, refused
from gateway.api.openapi import answered, documented
from gateway.api.routes import body_of, json_response
from gateway.store.history.replays import ReplayRecord
from gateway.wiring import Gateway

_MAX_LISTED = 100
_MAX_INTEGER = (1 << 53) - 1
"""The largest integer that is exact in every reader of JSON."""
_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2-q4",
    "since": 1796083200,
    "share": 0.01,
    "seed": 0,
    "drawn": 15,
    "compared": 15,
    "equal": 11,
    "failed": 0,
    "median_token": 1,
    "median_character": 3,
    "median_margin": 0.001,
}

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, le=_MAX_INTEGER)]
Integer = Annotated[int, Meta(ge=-_MAX_INTEGER, le=_MAX_INTEGER)]
Share = Annotated[float, Meta(gt=0, le=1)]


class ReplayReport(Body, frozen=True, kw_only=True):
    """The body of ``POST /v1/replays``: what a replay found about all requests together."""

    model: Annotated[Name, Meta(description="The model that answered again.")]
    fingerprint: Annotated[
        str, Meta(max_length=128, description="That of the model; empty if it is not known.")
    ] = ""
    since: Annotated[Integer, Meta(description="Unix time of the oldest requests.")]
    share: Annotated[Share, Meta(description="The share of the requests that was to be drawn.")]
    seed: Annotated[Integer, Meta(description="The seed of the draw.")]
    drawn: Annotated[Count, Meta(description="Requests that the draw took.")]
    compared: Annotated[Count, Meta(description="Requests that were answered again and compared.")]
    equal: Annotated[Count, Meta(description="Equal answers.")]
    failed: Annotated[Count, Meta(description="Requests that have no new answer.")]
    median_token: Annotated[
        Count | None, Meta(description="Equal tokens before the place where answers part.")
    ] = None
    median_character: Annotated[Count | None, Meta(description="The same in characters.")] = None
    median_margin: Annotated[
        float | None,
        Meta(
            description="By how much the model prefers its own token at that place, as a "
            "difference of logarithms."
        ),
    ] = None
    median_margin_is_at_least: Annotated[
        bool, Meta(description="Whether the margin is a lower bound.")
    ] = False


class ReplayStatus(Struct, frozen=True, kw_only=True, tag_field="object", tag="replay"):
    id: str
    tenant: str
    """The tenant whose stored requests were answered again."""
    created_at: int
    """Unix time of the replay's end."""
    report: ReplayReport


class ReplayList(Struct, frozen=True, kw_only=True):
    data: Sequence[ReplayStatus]
    """The newest reports of all tenants, the newest first."""


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/v1/replays",
        tags=["replays"],
        openapi_extra=documented(ReplayReport, _EXAMPLE, ReplayStatus, streams=False),
    )
    async def keep_report(request: Request) -> Response:
        """Keep the report of a replay for operators. The newest 50 reports of a tenant are kept."""
        report = await body_of(gateway, request, ReplayReport)
        if report.equal > report.compared:
            raise refused("equal", f"more than the {report.compared} answers that were compared.")
        if report.compared + report.failed > report.drawn:
            raise refused("drawn", "less than the requests that were compared or failed.")
        replays = (await gateway.store.open()).replays
        fields = msgspec.to_builtins(report)
        return json_response(_status(await replays.add(request.state.tenant, fields)))

    @routes.get(
        "/admin/v1/replays",
        tags=["operators"],
        openapi_extra={"responses": {"200": answered(ReplayList)}},
    )
    async def list_reports(
        limit: int = Query(20, ge=1, le=_MAX_LISTED, description="How many at most."),
    ) -> Response:
        """List the newest reports of replays of all tenants."""
        replays = (await gateway.store.open()).replays
        return json_response(ReplayList(data=list(map(_status, await replays.newest(limit)))))

    return routes


def _status(record: ReplayRecord) -> ReplayStatus:
    return ReplayStatus(
        id=record.id,
        tenant=record.tenant,
        created_at=int(record.created_at),
        report=msgspec.convert(record.report, ReplayReport),
    )

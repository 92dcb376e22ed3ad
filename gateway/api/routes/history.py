"""GET /admin/v1/history: what this gateway has measured in the last hour."""

from collections.abc import Sequence

from fastapi import APIRouter, Response
from msgspec import Struct

from gateway.api.openapi import answered
from gateway.api.routes import json_response
from gateway.fleet.samples import INTERVAL_S, Sample
from gateway.wiring import Gateway


class HistorySample(Struct, frozen=True, kw_only=True):
    """What happened in an interval, and what there was at its end."""

    at: float
    """The end of the interval, in Unix time."""
    tokens_per_s: float
    """Tokens that this gateway passed on to clients."""
    first_token_s: float | None
    """The 95th percentile of the time to first token; null if no request got its first token."""
    num_first_tokens: int
    num_running: int
    """Requests in flight at this gateway."""
    num_waiting: int
    """Jobs that wait for a worker, of all gateways."""


def history_sample(sample: Sample) -> HistorySample:
    return HistorySample(**sample._asdict())


class History(Struct, frozen=True, kw_only=True):
    gateway: str
    """The id of the gateway: behind a proxy, each answer may come from another gateway."""
    interval_s: float
    data: Sequence[HistorySample]
    """The intervals of at most an hour, the oldest interval first."""


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/admin/v1", tags=["operators"])

    @routes.get("/history", openapi_extra={"responses": {"200": answered(History)}})
    async def get_history() -> Response:
        """Show tokens per second, times to first token, and waiting jobs of the last hour, as this
        gateway has measured them since its start."""
        samples = [history_sample(sample) for sample in gateway.samples.latest]
        history = History(gateway=gateway.limits.name, interval_s=INTERVAL_S, data=samples)
        return json_response(history)

    return routes

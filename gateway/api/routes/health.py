"""GET /live, /health and /metrics: for orchestrators and dashboards."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from gateway.intake.keys.accepted import authorization_of
from gateway.wiring import Gateway


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    def models() -> dict[str, Any]:
        return {
            model: [
                {
                    "worker": worker.worker,
                    "max_num_seqs": worker.max_num_seqs,
                    "num_running": worker.num_running,
                    "num_waiting": worker.num_waiting,
                    "kv_usage": worker.kv_usage,
                    "clock_ahead_s": round(gateway.workers.clocks.ahead_s(worker.worker), 3),
                }
                for worker in workers
            ]
            for model, workers in sorted(gateway.workers.models().items())
        }

    @routes.head("/live", include_in_schema=False)
    @routes.get("/live")
    async def live() -> dict[str, str]:
        """Answer that the process runs."""
        return {"status": "ok"}

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", responses={503: {"description": "No requests are taken."}})
    async def health(request: Request) -> Response:
        """Tell whether requests are taken: 503 while the broker is away or blocks publishers, or
        the gateway drains. Requests in flight, live workers, the state of the stores and problems
        of single models are listed for API keys with the scope `metrics`, and for everyone on a
        gateway without keys. Without a worker requests are still taken, because jobs wait; without
        stores they are taken, because streams do not need stores."""
        now = gateway.state
        body: dict[str, Any] = {"status": now}
        if gateway.keys.permit(authorization_of(request.headers), "metrics"):
            stores = {
                name: "ok" if outage.is_up() else "unavailable"
                for name, outage in gateway.store.outages.items()
            }
            body |= {
                "requests": gateway.admission.num_requests,
                "models": models(),
                "stores": stores,
                "problems": gateway.workers.problems(),
            }
        return JSONResponse(body, 200 if now == "ok" else 503)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Tell everything that is measured, in Prometheus' text format."""
        return Response(gateway.metrics.render(), media_type=gateway.metrics.content_type)

    return routes

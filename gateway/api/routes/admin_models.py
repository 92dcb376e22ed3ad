"""/admin/v1/models: the models that gateways watch, and their removal."""

from collections.abc import Sequence

from fastapi import APIRouter, Path, Response
from msgspec import Struct

from gateway.api.openapi import answered
from gateway.api.routes import json_response
from gateway.wiring import Gateway
from shared import topology
from shared.errors import AccessRefused, Conflict
from shared.retirement import remove_model

_MODEL = Path(max_length=128, description="The name of the model.")


class ModelStatus(Struct, frozen=True, kw_only=True):
    model: str
    num_workers: int
    """Live workers."""
    num_waiting: int
    """Jobs that wait in all queues of the model."""
    seen_at: float
    """When the model was last announced, requested, or had a job in a queue, as a Unix time."""


class ModelStatusList(Struct, frozen=True, kw_only=True):
    data: Sequence[ModelStatus]


class RemovedModel(Struct, frozen=True, kw_only=True):
    model: str
    num_jobs: int
    """Waiting jobs that were answered with an error."""


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix="/admin/v1/models", tags=["operators"])

    @routes.get("", openapi_extra={"responses": {"200": answered(ModelStatusList)}})
    async def list_known_models() -> Response:
        """List the models whose queues exist, with or without live workers."""
        known = sorted(gateway.workers.known_models.items())
        data = [_status(gateway, model, seen_at) for model, seen_at in known]
        return json_response(ModelStatusList(data=data))

    @routes.delete("/{model:path}", openapi_extra={"responses": {"200": answered(RemovedModel)}})
    async def remove_known_model(model: str = _MODEL) -> Response:
        """Remove a model that no worker serves: answer its waiting jobs with an error, and delete
        its queues. The gateway's account of the broker needs the permission to do so."""
        if gateway.workers.of_model(model):
            raise Conflict(f"Workers serve the model '{model}': drain them first.")
        try:
            num_jobs = await remove_model(gateway.bus, model)
        except AccessRefused:
            raise Conflict(
                "The gateway's account of the broker may not delete queues of jobs. Use `warren "
                "models remove` with the broker's account of an operator."
            ) from None
        gateway.workers.forget_model(model)
        return json_response(RemovedModel(model=model, num_jobs=num_jobs))

    return routes


def _status(gateway: Gateway, model: str, seen_at: float) -> ModelStatus:
    readings = gateway.queues.readings
    lanes = (readings.get((model, lane)) for lane in topology.LANES)
    return ModelStatus(
        model=model,
        num_workers=len(gateway.workers.of_model(model)),
        num_waiting=sum(reading.num_waiting for reading in lanes if reading is not None),
        seen_at=seen_at,
    )

"""GET /v1/models: what live workers serve."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from gateway.api.openapi import MODEL, MODELS, answered
from gateway.wiring import Gateway
from shared.errors import ModelNotFound
from shared.messages import Announcement


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["models"])

    def describe(model: str, workers: Sequence[Announcement]) -> dict[str, Any]:
        return {
            "id": model,
            "object": "model",
            "created": gateway.workers.first_seen_at(model),
            "owned_by": "warren",
            "root": model,
            "parent": None,
            "max_model_len": min(worker.max_seq_len for worker in workers),
        }

    @routes.head("/v1/models", include_in_schema=False)
    @routes.get("/v1/models", openapi_extra={"responses": {"200": answered(MODELS)}})
    async def list_models() -> dict[str, Any]:
        """List the models that have a live worker."""
        models = sorted(gateway.workers.models().items())
        return {"object": "list", "data": [describe(*model) for model in models]}

    @routes.head("/v1/models/{model:path}", include_in_schema=False)
    @routes.get("/v1/models/{model:path}", openapi_extra={"responses": {"200": answered(MODEL)}})
    async def get_model(model: str) -> dict[str, Any]:
        """Describe one model."""
        workers = gateway.workers.models().get(model)
        if workers is None:
            raise ModelNotFound(f"The model '{model}' has no live worker.", param="model")
        return describe(model, workers)

    return routes

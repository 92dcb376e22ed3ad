"""GET /v1/models: the models that live workers serve."""

from collections.abc import Sequence

from fastapi import APIRouter, Path, Request, Response
from msgspec import Struct

from gateway.api.openapi import answered
from gateway.api.routes import json_response
from gateway.intake.keys.api_key import ApiKey
from gateway.wiring import Gateway
from shared.errors import ModelNotFound
from shared.messages import Announcement

_MODEL = Path(description="The name of the model.")


class Model(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="object", tag="model"
):
    id: str
    created: int
    owned_by: str = "warren"
    root: str
    parent: None = None
    max_model_len: int
    fingerprint: str
    """A hash of weights, configuration and tokenizer, the same for all workers of a model."""
    max_num_seqs: int
    """The most sequences that the model's workers run at once, all together."""
    engine: str
    """The kind and version of the server that computes the tokens; empty for Warren's engine."""
    unsupported_parameters: Sequence[str]
    """The sampling parameters that the engine lacks. A request with any of these parameters is
    refused."""
    engine_constraints: Sequence[str]
    """The kinds of constraints that the engine takes in its own form: json_schema, regex. Workers
    apply the other kinds themselves."""


class ModelList(Struct, frozen=True, forbid_unknown_fields=True, tag_field="object", tag="list"):
    data: Sequence[Model]


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["models"])

    def describe(model: str, workers: Sequence[Announcement]) -> Model:
        return Model(
            id=model,
            created=gateway.workers.first_seen_at(model),
            root=model,
            max_model_len=min(worker.max_seq_len for worker in workers),
            fingerprint=", ".join(sorted({worker.fingerprint for worker in workers})),
            max_num_seqs=sum(worker.max_num_seqs for worker in workers),
            engine=", ".join(sorted({worker.engine for worker in workers})),
            unsupported_parameters=sorted({n for worker in workers for n in worker.unsupported}),
            engine_constraints=sorted(
                set.intersection(*({*worker.engine_constraints} for worker in workers))
            ),
        )

    @routes.head("/v1/models", include_in_schema=False)
    @routes.get("/v1/models", openapi_extra={"responses": {"200": answered(ModelList)}})
    async def list_models(request: Request) -> Response:
        """List the models that have a live worker, and that the API key may use."""
        caller: ApiKey = request.state.caller
        models = sorted(gateway.workers.models().items())
        models = [one for one in models if caller.allows_model(one[0])]
        return json_response(ModelList([describe(*model) for model in models]))

    @routes.head("/v1/models/{model:path}", include_in_schema=False)
    @routes.get("/v1/models/{model:path}", openapi_extra={"responses": {"200": answered(Model)}})
    async def get_model(request: Request, model: str = _MODEL) -> Response:
        """Describe a model."""
        caller: ApiKey = request.state.caller
        caller.require_model(model)
        workers = gateway.workers.models().get(model)
        if workers is None:
            raise ModelNotFound(f"The model '{model}' has no live worker.", param="model")
        return json_response(describe(model, workers))

    return routes

"""POST /v1/streams/{id}/fork: continues an answer at any of its tokens, with other parameters."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Query, Request, Response
from starlette.types import Send

from gateway.api.abandoned_responses import read_all
from gateway.api.bodies.messages import MessagesRequest
from gateway.api.bodies.parsing import refused
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from gateway.api.bodies.submission import GenerationBody
from gateway.api.openapi import documented
from gateway.api.render.formats import ChatCompletion, decode_rendering
from gateway.api.response_storage import ResponseStorage
from gateway.api.routes.generation import LiveResponse, Origin, ParsedRequest, generate
from gateway.api.routes.streams import STREAM_ID, checked_id
from gateway.intake.admission import Entry
from gateway.log.cursor import Departure
from gateway.wiring import Gateway
from shared.errors import InvalidRequest, Unavailable

_KINDS: Mapping[str, type[GenerationBody]] = {
    "chatcmpl-": ChatRequest,
    "cmpl-": CompletionRequest,
    "msg_": MessagesRequest,
}
"""The bodies of forks, by the beginning of the stream's id."""
_BYTES_OF_TOKEN = 64
"""The approximate memory of a given token, in the log that was read and in the job."""
_AT = Query(ge=0, description="The number of the answer's tokens that the fork begins with.")
_CHOICE = Query(0, ge=0, description="The choice of the answer.")
_EXAMPLE: Mapping[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0.9,
    "n": 2,
    "max_tokens": 32,
}


class ParsedFork(ParsedRequest):
    """A parsed body that continues another answer."""

    async def load_history(
        self, gateway: Gateway, tenant: str, entry: Entry
    ) -> tuple[ParsedRequest, ResponseStorage | None]:
        assert self.origin is not None
        given_ids = await _tokens(gateway, self.origin, tenant, self.body.model)
        entry.hold(_BYTES_OF_TOKEN * len(given_ids))
        return self._replace(given_ids=given_ids), None


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["streams"])

    @routes.post(
        "/v1/streams/{stream_id}/fork",
        openapi_extra=documented(ChatRequest, _EXAMPLE, ChatCompletion, streams=True),
    )
    async def fork_stream(
        stream_id: str = STREAM_ID, at: int = _AT, choice: int = _CHOICE
    ) -> Response:
        """Continue an answer at any of its tokens with other parameters. The body is the same as in
        a request to the endpoint of the stream, and the answer begins with the tokens before `at`.
        The stream must still be kept; its current reader is disconnected."""
        prefix, kind = _kind(checked_id(stream_id))

        def read(raw_body: bytes) -> ParsedRequest:
            parsed = ParsedFork.of(kind, raw_body)
            return parsed._replace(origin=Origin(stream_id, choice, at))

        async def serve(request: Request, send: Send) -> None:
            await generate(gateway, request, send, prefix, read)

        return LiveResponse(serve)

    return routes


def _kind(stream_id: str) -> tuple[str, type[GenerationBody]]:
    """The beginning of the ids of forks, and their bodies. Raises `InvalidRequest`."""
    for prefix, kind in _KINDS.items():
        if stream_id.startswith(prefix):
            return prefix, kind
    raise InvalidRequest(
        "Only chats, completions and messages can be forked; previous_response_id continues a "
        "response.",
        param="stream_id",
    )


async def _tokens(gateway: Gateway, origin: Origin, tenant: str, model: str) -> tuple[int, ...]:
    """The tokens of an answer before the place at which it is continued. Raises `InvalidRequest`
    if the answer has no such place or is of another model, `StreamNotFound`, `StreamExpired` and
    `Unavailable`."""
    async with gateway.executions.resume(origin.stream_id, tenant) as relay:
        relay.close(Departure.LEFT)
        await read_all(relay)
    if relay.facts is None:
        raise Unavailable("No worker has started on this stream yet.")
    rendering, chains = decode_rendering(relay.facts), relay.cursor.reader.chains
    if rendering.model != model:
        raise refused("model", f"a fork has the model of its stream, {rendering.model!r}.")
    if origin.choice >= len(chains):
        raise refused("choice", f"{origin.choice}, but the choices are 0 to {len(chains) - 1}.")
    token_ids = chains[origin.choice].token_ids
    if origin.at > len(token_ids):
        raise refused("at", f"{origin.at}, but the choice has {len(token_ids)} tokens.")
    return tuple(token_ids[: origin.at])

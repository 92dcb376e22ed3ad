"""A module for each group of endpoints, with a ``router`` that `gateway.app` includes."""

from functools import partial
from typing import TypeVar

import msgspec
from fastapi import Request, Response

from gateway.api.bodies.parsing import Body, parse
from gateway.intake.admission import read_body
from gateway.wiring import Gateway
from shared.off_loop import off_loop

_Body = TypeVar("_Body", bound=Body)


def json_response(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def body_of(gateway: Gateway, request: Request, kind: type[_Body]) -> _Body:
    """The body of a small request, which holds a slot only while it is read. Raises
    `InvalidRequest`."""
    with gateway.admission.admit_with_body(request.state.tenant) as entry:
        raw_body = await read_body(request, gateway.settings.max_body_bytes, entry)
        return await off_loop(partial(parse, kind, raw_body), entry.num_bytes)

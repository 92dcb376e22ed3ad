"""One module for each group of endpoints, with a ``router`` that `gateway.app` includes."""

import msgspec
from fastapi import Response


def json_response(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")

"""The requests that a gateway has stored for a tenant, each with its answer."""

import hashlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from cli.gateway_client import request_json, unanswered
from shared.errors import NotFound, Unavailable

if TYPE_CHECKING:
    import httpx

_PAGE = 100
_ANSWERED = ("completed", "incomplete")
"""The statuses of responses that have an answer."""
_REPEATED = (
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "truncation",
)
"""The parameters of its request that a response repeats."""


class StoredRequest(NamedTuple):
    """A request with the answer that it had."""

    id: str
    endpoint: str
    body: Mapping[str, Any]
    answer: Any


class Draw(NamedTuple):
    """Decides which of the stored requests are answered again. The decision about a request depends
    on nothing but its id and the seed."""

    share: float
    """Of the requests, from 0 to 1."""
    seed: int

    def takes(self, request_id: str) -> bool:
        digest = hashlib.sha256(f"{self.seed}:{request_id}".encode()).digest()
        return int.from_bytes(digest[:8]) < self.share * 2**64


RequestSource: TypeAlias = Callable[["httpx.Client", int, Draw], Iterator[StoredRequest]]
"""The drawn requests that were stored since a Unix time in seconds, each with its answer. Raises
the errors of the gateway."""


class _KeptAnswer(msgspec.Struct):
    body: Any


class _AskedLine(msgspec.Struct):
    custom_id: str
    body: dict[str, Any]


class _AnsweredLine(msgspec.Struct):
    custom_id: str
    response: _KeptAnswer


def of_batches(client: "httpx.Client", since: int, draw: Draw) -> Iterator[StoredRequest]:
    """The requests of batches that were created since then and have ended. The requests of a batch
    whose files are deleted are left out."""
    for batch in _listed(client, "/v1/batches", since):
        if batch["output_file_id"] is None:
            continue
        prefix = f"{batch['id']}/"
        try:
            bodies: dict[str, dict[str, Any]] = {}
            for text in _lines(client, batch["input_file_id"]):
                line = msgspec.json.decode(text, type=_AskedLine)
                if draw.takes(prefix + line.custom_id):
                    bodies[line.custom_id] = line.body
            if not bodies:
                continue
            for text in _lines(client, batch["output_file_id"]):
                answered = msgspec.json.decode(text, type=_AnsweredLine)
                body = bodies.get(answered.custom_id)
                if body is not None:
                    stored_id = prefix + answered.custom_id
                    yield StoredRequest(stored_id, batch["endpoint"], body, answered.response.body)
        except NotFound:
            continue


def of_responses(client: "httpx.Client", since: int, draw: Draw) -> Iterator[StoredRequest]:
    """The stored responses that were begun since then and have ended with an answer. Their requests
    have the parameters that a response repeats, and all items before them as their input."""
    for listed in _listed(client, "/v1/responses", since):
        if not draw.takes(listed["id"]):
            continue
        path = f"/v1/responses/{listed['id']}"
        try:
            answer = request_json(client, "GET", path)
            if answer["status"] in _ANSWERED:
                items = list(_pages(client, f"{path}/input_items", order="asc"))
                said = {name: answer.get(name) for name in _REPEATED}
                body = {name: value for name, value in said.items() if value is not None}
                yield StoredRequest(listed["id"], "/v1/responses", {**body, "input": items}, answer)
        except NotFound:  # deleted meanwhile
            continue


SOURCES: Sequence[RequestSource] = (of_batches, of_responses)
"""Everything that a gateway keeps together with its answers."""


def _listed(client: "httpx.Client", path: str, since: int) -> Iterator[dict[str, Any]]:
    """The objects of a list, the newest first, that were created since a Unix time."""
    return takewhile(lambda one: one["created_at"] >= since, _pages(client, path))


def _pages(client: "httpx.Client", path: str, **params: str) -> Iterator[dict[str, Any]]:
    """The objects of all pages of a list."""
    after: dict[str, str] = {}
    while True:
        page = request_json(client, "GET", path, params={"limit": _PAGE, **params, **after})
        yield from page["data"]
        if not page["has_more"]:
            return
        after = {"after": page["last_id"]}


def _lines(client: "httpx.Client", file_id: str) -> Iterator[bytes]:
    """The lines of a file that are not empty. Raises `NotFound` and `Unavailable`."""
    import httpx

    try:
        with client.stream("GET", f"/v1/files/{file_id}/content") as response:
            if response.status_code == httpx.codes.NOT_FOUND:
                raise NotFound(f"{file_id} is no longer kept")
            if not response.is_success:
                raise Unavailable(f"{file_id} cannot be read: HTTP {response.status_code}")
            rest = b""
            # A client's file may lack the end of its last line.
            for part in chain(response.iter_bytes(), (b"\n",)):
                *lines, rest = (rest + part).split(b"\n")
                yield from (line.removeprefix(BOM_UTF8) for line in lines if line.strip())
    except httpx.HTTPError as lost:
        raise Unavailable(unanswered(client.base_url, lost)) from lost

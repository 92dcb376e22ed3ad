"""Whatever a client sends, it is the client's fault or it is answered."""

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.bodies.messages import MessagesRequest
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from gateway.api.bodies.scoring import RerankRequest, ScoreRequest
from shared.bus.memory import MemoryBroker, MemoryBus
from tests.support.gateway.http import LiveGateway, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker

NAMES = sorted(
    {
        *ChatRequest.__struct_fields__,
        *CompletionRequest.__struct_fields__,
        *MessagesRequest.__struct_fields__,
        *RerankRequest.__struct_fields__,
        *ScoreRequest.__struct_fields__,
        *ResponsesRequest.__struct_fields__,
        "x",
    }
)
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
    | st.sampled_from(["scripted", "user", "text", "\ud800", "\x00"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name"]), inner)
    ),
    max_leaves=6,
)
fields = st.dictionaries(st.sampled_from(NAMES), values, max_size=4)
valid = st.sampled_from(
    [
        {
            "model": "scripted",
            "prompt": "a b",
            "input": "a b",
            "messages": [{"role": "user", "content": "a b"}],
            "max_tokens": 2,
            "query": "a",
            "documents": ["a", "b"],
            "text_1": "a",
            "text_2": "b",
        },
        {},
    ]
)
bodies = st.tuples(valid, fields).map(lambda parts: json.dumps({**parts[0], **parts[1]}).encode())
requests = st.tuples(st.sampled_from(PATHS), bodies | st.binary(max_size=40))


async def statuses(batch: list[tuple[str, bytes]]) -> list[tuple[int, Any]]:
    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as worker_bus,
        ScriptedWorker(worker_bus),
        live_gateway(broker) as gateway,
    ):
        responses = [
            await gateway.http.post(
                path, content=body, headers={"content-type": "application/json"}
            )
            for path, body in batch
        ]
    return [(response.status_code, response.text) for response in responses]


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.large_base_example, HealthCheck.too_slow],
)
@given(st.lists(requests, min_size=15, max_size=30))
def test_no_body_is_the_servers_fault(batch: list[tuple[str, bytes]]) -> None:
    answers = asyncio.run(statuses(batch))

    for request, (status, text) in zip(batch, answers, strict=True):
        is_hurried = b'"timeout"' in request[1]
        assert status < 500 or (status == 504 and is_hurried), (request, text)
        if status == 200:
            assert '"error"' not in text, (request, text)


async def test_urls_in_requests_are_not_fetched(gateway: LiveGateway) -> None:
    visits: list[object] = []

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(reader)
        writer.close()

    async with await asyncio.start_server(visited, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
        image = {"type": "image_url", "image_url": {"url": url}}
        source = {"type": "image", "source": {"type": "url", "url": url}}
        requests: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": url}]}),
            (
                "/v1/responses",
                {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": url}]}]},
            ),
            ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_url": url}]}),
            (
                "/v1/messages",
                {"max_tokens": 1, "messages": [{"role": "user", "content": [source]}]},
            ),
            (
                "/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": "x"}],
                    "guided_json": {"$ref": url},
                },
            ),
        ]
        statuses = [
            (await gateway.post(path, model="scripted", **body)).status_code
            for path, body in requests
        ]

    assert statuses == [400, 200, 400, 200, 400, 400]
    assert visits == []

"""Answers of SmolLM2 with receipts, from a gateway and a worker."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared import settings
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.settings import WorkerSettings
from tests.support.gateway.http import LiveGateway, hears_a_worker, live_gateway
from tests.support.receipts import keys_of, new_signing_key
from worker.decode import served_model
from worker.process.service import run_worker

MODEL = "smollm2"
REQUESTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sampled chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Tell me about lighthouses."}],
            "max_tokens": 80,
            "ignore_eos": True,
            "seed": (1 << 62) + 1,
            "frequency_penalty": 0.4,
            "logit_bias": {"19": 2.5},
            "top_p": 0.95,
        },
    ),
    "several choices": (
        "/v1/completions",
        {"prompt": ["Once upon", "The sea"], "n": 2, "max_tokens": 24, "temperature": 0.9},
    ),
    "constrained": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "How warm is it? Answer in JSON."}],
            "max_tokens": 40,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "weather",
                    "schema": {
                        "type": "object",
                        "properties": {"celsius": {"type": "integer"}},
                        "required": ["celsius"],
                    },
                },
            },
        },
    ),
    "stop string": (
        "/v1/completions",
        {"prompt": "1, 2, 3, 4,", "max_tokens": 40, "temperature": 0, "stop": "9"},
    ),
    "message": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 12,
            "temperature": 0,
        },
    ),
    "response": ("/v1/responses", {"input": "Count to three.", "max_output_tokens": 12}),
}


@dataclass(frozen=True)
class Answers:
    """What was asked and answered, by name, and the published keys."""

    requests: Mapping[str, bytes]
    answers: Mapping[str, dict[str, Any]]
    keys: dict[str, Any]
    signing_key: Path
    seconds: Mapping[str, float]
    """The CPU time of each answer."""


@pytest.fixture(scope="session")
def signing_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_signing_key(tmp_path_factory.mktemp("receipts"))


@pytest.fixture(scope="session")
def answered(smollm2: Path, signing_key: Path) -> Answers:
    return asyncio.run(answers_of(smollm2, signing_key, REQUESTS))


async def answers_of(
    model: Path,
    signing_key: Path,
    requests: Mapping[str, tuple[str, Mapping[str, Any]]],
    **options: Any,
) -> Answers:
    """Ask a worker that has the model in the directory ``model`` all ``requests``."""
    bodies = {name: body_of(body) for name, (_, body) in requests.items()}
    found, seconds = list[dict[str, Any]](), list[float]()
    async with deployment(model, signing_key, **options) as gateway:
        for (path, _), body in zip(requests.values(), bodies.values(), strict=True):
            began = time.process_time()
            found.append(await asked(gateway, path, body))
            seconds.append(time.process_time() - began)
        keys = await keys_of(gateway)
    answers = dict(zip(bodies, found, strict=True))
    return Answers(bodies, answers, keys, signing_key, dict(zip(bodies, seconds, strict=True)))


@asynccontextmanager
async def deployment(model: Path, signing_key: Path, **options: Any) -> AsyncIterator[LiveGateway]:
    """A gateway that signs receipts, and a worker of the model in the directory ``model``.
    ``options`` are the worker's."""
    worker = settings.load(
        WorkerSettings,
        model=str(model),
        served_name=MODEL,
        kv_cache_bytes=64 << 20,
        compute_threads=1,
        stall_timeout_s=3600,  # a busy machine may stop this process within a step
        **options,
    )
    broker, stop, ready = MemoryBroker(), asyncio.Event(), asyncio.Event()
    served = served_model.load_for_worker(worker)
    async with (
        MemoryBus(broker) as bus,
        live_gateway(broker, receipt_keys_file=signing_key, disconnect_grace_s=5) as gateway,
    ):
        working = asyncio.create_task(
            run_worker(worker, bus, stop=stop, ready=ready.set, model=served)
        )
        await hears_a_worker(gateway)
        yield gateway
        stop.set()
        await working


def body_of(body: Mapping[str, Any]) -> bytes:
    """The body of a request that asks for a receipt."""
    return json.dumps({"model": MODEL, "receipt": True, **body}).encode()


async def asked(gateway: LiveGateway, path: str, body: bytes, **headers: str) -> dict[str, Any]:
    headers = {"content-type": "application/json", **headers}
    response = await gateway.http.post(path, content=body, headers=headers)
    answer: dict[str, Any] = response.json()
    assert response.status_code == 200, answer
    return answer

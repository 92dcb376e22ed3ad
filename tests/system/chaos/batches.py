"""A batch whose processes, broker and database are killed, beside its undisturbed answers."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import httpx

from tests.support.deployment.postgres import PostgresServer
from tests.system.chaos.callers import Question
from tests.system.chaos.campaign import Fault, Row, leaving, patient_client
from tests.system.chaos.deployment import Deployment

_URL = "/v1/completions"
_BETWEEN_FAULTS_S = 10.0
_SEED = 0
_POLL_S = 0.2
_PATIENCE_S = 2 * 3600.0
_NUM_LEAVERS = 1
_EQUAL, _OF = 3, 10
"""So many lines of so many are equal to lines before them, whose answers they repeat."""
_Texts: TypeAlias = Sequence[tuple[str, str]]
_ENDED = ("completed", "failed", "expired", "cancelled")


def short_questions() -> list[Question]:
    return [Question("echo", f"Question {k}", 16 + k % 8, seed=k) for k in range(40)]


BATCH_TUNING = {"batch_lease_s": 3.0, "max_batch_window": 64}
"""Gateways continue each other's batches soon, and a part of a batch is in the queue."""


def batch_options(database: PostgresServer) -> list[str]:
    return [f"--database-url={database.url}"]


async def nothing() -> None:
    """The fault of a row that has several."""


async def batch_row(
    deployment: Deployment, questions: Sequence[Question], num_lines: int, faults: Sequence[Fault]
) -> Row:
    """Answer each question in an undisturbed batch, and then ``num_lines`` lines with the same
    questions in a second batch, which computes most of them. A fault strikes every ten seconds
    until the second batch has ended, and clients that leave ask beside it; each line's answer must
    equal the undisturbed answer to its question."""
    lines = [questions[k % len(questions)] for k in range(num_lines)]
    row = Row("batch: worker, gateway, broker, database killed", 0)
    async with patient_client() as client:
        undisturbed = await _ended(deployment, client, questions)
        answers = dict(await _texts(deployment, client, undisturbed))
        expected = {_name(k): answers[_name(k % len(questions))] for k in range(num_lines)}
        began_at = time.monotonic()
        async with (
            leaving(deployment, questions, _NUM_LEAVERS, row.tally),
            asyncio.TaskGroup() as tasks,
        ):
            striking = tasks.create_task(_strike(faults, row))
            batch = await _ended(deployment, client, lines)
            striking.cancel()
        row.duration_s = time.monotonic() - began_at
        _compare(row, expected, await _texts(deployment, client, batch))
    return row


def _compare(row: Row, expected: Mapping[str, str], seen: _Texts) -> None:
    texts = dict(seen)
    for name in texts.keys() - expected.keys():
        row.tally.fail(f"{name} was not asked for")
    row.tally.num_repeated += len(seen) - len(texts)
    for name, text in expected.items():
        if name in texts:
            row.tally.compare(texts[name], text)
        else:
            row.tally.fail(f"{name} has no answer")


def _name(line: int) -> str:
    return f"line {line}"


async def _strike(faults: Sequence[Fault], row: Row) -> None:
    chance = random.Random(_SEED)
    while True:
        await asyncio.sleep(_BETWEEN_FAULTS_S)
        fault = chance.choice(faults)
        row.num_tries += 1
        # What has begun must end, so that everything runs afterwards.
        striking = asyncio.ensure_future(fault())
        try:
            await asyncio.shield(striking)
        except asyncio.CancelledError:
            await striking
            raise


async def _ended(
    deployment: Deployment, client: httpx.AsyncClient, lines: Sequence[Question]
) -> dict[str, Any]:
    """Order a batch, and wait for its end."""
    content = "".join(
        json.dumps(
            {
                "custom_id": _name(k),
                "method": "POST",
                "url": _URL,
                "body": {**line.body, "stream": False, **_mark(k)},
            }
        )
        + "\n"
        for k, line in enumerate(lines)
    )
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content.encode())}}
    file = await _asked(deployment, client, "POST", "/v1/files", **form)
    order = {"input_file_id": file.json()["id"], "endpoint": _URL, "completion_window": "24h"}
    batch = (await _asked(deployment, client, "POST", "/v1/batches", json=order)).json()
    async with asyncio.timeout(_PATIENCE_S):
        while batch["status"] not in _ENDED:
            await asyncio.sleep(_POLL_S)
            path = f"/v1/batches/{batch['id']}"
            batch = (await _asked(deployment, client, "GET", path)).json()
    return dict(batch)


async def _texts(
    deployment: Deployment, client: httpx.AsyncClient, batch: dict[str, Any]
) -> _Texts:
    """The ``custom_id`` and the text of each answer. Raises `AssertionError` if a line has
    failed."""
    assert (batch["status"], batch["error_file_id"]) == ("completed", None), batch
    path = f"/v1/files/{batch['output_file_id']}/content"
    content = (await _asked(deployment, client, "GET", path)).text
    answers = [json.loads(line) for line in content.splitlines()]
    return [
        (answer["custom_id"], answer["response"]["body"]["choices"][0]["text"])
        for answer in answers
    ]


def _mark(line: int) -> dict[str, str]:
    """What makes a line different from others with its question, and does not change its answer."""
    return {} if line % _OF < _EQUAL else {"user": _name(line)}


async def _asked(
    deployment: Deployment, client: httpx.AsyncClient, method: str, path: str, **more: Any
) -> httpx.Response:
    """Ask the gateways in turn until a gateway answers. The key has limits, which each line is
    checked against."""
    headers = deployment.tenants[-1].headers
    for url in itertools.cycle(deployment.urls()):
        try:
            response = await client.request(method, f"{url}{path}", headers=headers, **more)
            if response.status_code < 500:
                return response.raise_for_status()
        except httpx.TransportError:
            pass
        await asyncio.sleep(_POLL_S)
    raise AssertionError("there are no gateways")

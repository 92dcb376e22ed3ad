"""What requests have used, as clients ask for it."""

import csv
import io
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.intake.keys.key_file import KeyFile
from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBus
from shared.messages import UsageRecord, encode
from tests.support.gateway.http import LiveGateway, chat_body, eventually, live_gateway
from tests.support.workers.scripted_worker import ScriptedWorker

PRICES = '{"models": {"m": {"input": 1, "cached_input": 0.5, "output": 4, "cached_answer": 0.2}}}'
NUM_RECORDS = 4
NOW = float(int(time.time()))
DAY_S = 24 * 3600


class Recorded(NamedTuple):
    """A gateway that has written the records of two tenants."""

    gateway: LiveGateway
    alice: dict[str, str]
    """The headers of each."""
    bob: dict[str, str]
    operator: dict[str, str]

    async def get(self, path: str, headers: dict[str, str], **params: Any) -> Any:
        response = await self.gateway.http.get(path, headers=headers, params=params)
        assert response.status_code == 200, response.text
        return response.json()


def record(request_id: str, tenant: str, **fields: Any) -> UsageRecord:
    values: dict[str, Any] = {
        "key_id": "k",
        "model": "m",
        "job_class": "interactive",
        "outcome": "completed",
        "attempt": 1,
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "num_output_tokens": 5,
        "ended_at": NOW,
    }
    return UsageRecord(request_id=request_id, tenant=tenant, **{**values, **fields})


@pytest.fixture
async def recorded(
    bus: MemoryBus, worker: ScriptedWorker, tmp_path: Path
) -> AsyncIterator[Recorded]:
    keys = KeyFile(tmp_path / "keys")
    (tmp_path / "prices").write_text(PRICES)
    headers = [
        {"authorization": f"Bearer {key}"}
        for key in (keys.add("alice"), keys.add("bob"), keys.add("ops", scopes=("operator",)))
    ]
    files = {"keys_file": keys.path, "prices_file": tmp_path / "prices"}
    async with live_gateway(bus, data_dir=tmp_path, **files) as gateway:
        for one in (
            record("1", "alice"),
            record("2", "alice", model="n", outcome="cancelled"),
            record("3", "alice", ended_at=NOW - 2 * DAY_S, num_takeovers=1),
            record("1", "bob"),
        ):
            await bus.publish(topology.LEDGER_RECORDS.bindings[0], Message(encode(one)))

        async def are_written() -> bool:
            return await gateway.sample("warren_gateway_usage_records_total") == NUM_RECORDS

        await eventually(are_written)
        yield Recorded(gateway, *headers)


async def test_a_tenant_that_has_spent_its_budget_is_refused_until_it_has_another(
    recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    async def limit(budget: float) -> Any:
        answer = await recorded.gateway.http.post(
            "/admin/v1/tenants/bob", json={"monthly_budget": budget}, headers=recorded.operator
        )
        return answer.json()

    async def ask(path: str, **body: Any) -> Any:
        return await recorded.gateway.http.post(path, json=chat_body() | body, headers=recorded.bob)

    limited = await limit(0.000028)
    reported = await recorded.get("/v1/usage", recorded.bob)
    refused = await ask("/v1/chat/completions")
    of_messages = await ask("/v1/messages", max_tokens=3)
    metrics = (await recorded.gateway.http.get("/metrics")).text
    await limit(1)
    answered = await ask("/v1/chat/completions")

    assert (limited["monthly_budget"], limited["spent"]) == (0.000028, 0.000028)
    budget = reported["budget"]
    assert (budget["monthly_budget"], budget["spent"]) == (0.000028, 0.000028)
    assert NOW < budget["resets_at"] <= NOW + 31 * DAY_S
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert "The tenant bob has spent its budget of 0.000028 USD" in error["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert of_messages.json()["error"]["type"] == "rate_limit_error"
    assert 'warren_gateway_budgets_reached{share="1"} 1.0' in metrics
    assert 'requests_refused_total{reason="tenant_monthly_budget"} 2.0' in metrics
    said = next(one for one in caplog.records if one.message.startswith("budget spent"))
    assert (vars(said)["tenant"], vars(said)["budget"]) == ("bob", 0.000028)
    assert answered.status_code == 200


async def test_a_tenant_sees_its_own_requests_only(recorded: Recorded) -> None:
    of_alice = await recorded.get("/v1/usage", recorded.alice, group_by="tenant")
    of_bob = await recorded.get("/v1/usage", recorded.bob, group_by="tenant,model")
    forged = await recorded.get("/v1/usage", recorded.bob, group_by="tenant", tenant="alice")

    assert [(row["tenant"], row["requests"]) for row in of_alice["data"]] == [("alice", 3)]
    assert [row["tenant"] for row in forged["data"]] == ["bob"]
    assert of_bob["data"] == [
        {
            "tenant": "bob",
            "api_key_id": None,
            "model": "m",
            "day": None,
            "requests": 1,
            "completed": 1,
            "input_tokens": 10,
            "cached_tokens": 4,
            "output_tokens": 5,
            "takeovers": 0,
            "queue_seconds": 0.0,
            "compute_seconds": 0.0,
            "cached_answers": 0,
            "cost": 0.000028,
        }
    ]
    assert (of_bob["object"], of_bob["currency"]) == ("list", "USD")


async def test_an_answer_computed_for_another_request_has_its_own_price(
    recorded: Recorded, bus: MemoryBus
) -> None:
    cached = record("2", "bob", attempt=0, num_cached_tokens=0, is_cached=True)
    await bus.publish(topology.LEDGER_RECORDS.bindings[0], Message(encode(cached)))

    async def is_written() -> bool:
        num_written = await recorded.gateway.sample("warren_gateway_usage_records_total")
        return num_written == NUM_RECORDS + 1

    await eventually(is_written)
    (row,) = (await recorded.get("/v1/usage", recorded.bob, group_by="model"))["data"]

    assert (row["requests"], row["completed"], row["cached_answers"]) == (2, 2, 1)
    assert (row["input_tokens"], row["output_tokens"]) == (20, 10)
    assert row["cost"] == 0.000028 + 0.000003


async def test_operators_see_all(recorded: Recorded) -> None:
    of_all = await recorded.get("/admin/v1/usage", recorded.operator)
    of_bob = await recorded.get("/admin/v1/usage", recorded.operator, tenant="bob", group_by="key")
    refused = await recorded.gateway.http.get("/admin/v1/usage", headers=recorded.alice)

    assert [(row["tenant"], row["model"], row["cost"]) for row in of_all["data"]] == [
        ("alice", "m", 0.000056),
        ("alice", "n", None),
        ("bob", "m", 0.000028),
    ]
    assert [(row["api_key_id"], row["requests"]) for row in of_bob["data"]] == [("k", 1)]
    assert refused.status_code == 403


async def test_a_time_is_chosen(recorded: Recorded) -> None:
    yesterday = int(NOW) - DAY_S

    since = await recorded.get("/v1/usage", recorded.alice, start_time=yesterday, group_by="")
    until = await recorded.get("/v1/usage", recorded.alice, end_time=yesterday, group_by="day")

    assert [row["requests"] for row in since["data"]] == [2]
    assert [(row["requests"], row["takeovers"]) for row in until["data"]] == [(1, 1)]


async def test_csv_has_the_groups_and_the_numbers(recorded: Recorded) -> None:
    params = {"format": "csv", "group_by": "model,tenant"}

    answer = await recorded.gateway.http.get("/v1/usage", headers=recorded.alice, params=params)

    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert list(rows[0])[:4] == ["tenant", "model", "requests", "completed"]
    assert [(row["model"], row["output_tokens"], row["cost"]) for row in rows] == [
        ("m", "10", "0.000056"),
        ("n", "5", ""),
    ]


async def test_a_tenant_is_erased(recorded: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    http, params = recorded.gateway.http, {"tenant": "alice"}

    refused = await http.delete("/admin/v1/usage", headers=recorded.bob, params=params)
    with caplog.at_level(logging.INFO, "warren.audit"):
        erased = await http.delete("/admin/v1/usage", headers=recorded.operator, params=params)
    left = await recorded.get("/admin/v1/usage", recorded.operator, group_by="tenant")

    assert refused.status_code == 403
    assert erased.json() == {"tenant": "alice", "num_records": 3}
    (act,) = (one for one in caplog.records if one.message == "usage records erased")
    assert vars(act)["audit"]["erased_tenant"] == "alice"
    assert [row["tenant"] for row in left["data"]] == ["bob"]


@pytest.mark.parametrize(
    "params",
    [
        {"group_by": "model,week"},
        {"format": "xml"},
        {"start_time": "yesterday"},
        {"start_time": -1},
        {"start_time": 2, "end_time": 1},
    ],
)
async def test_bad_parameters_are_named(storing: LiveGateway, params: dict[str, Any]) -> None:
    refused = await storing.http.get("/v1/usage", params=params)

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == next(iter(params))

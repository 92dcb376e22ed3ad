"""The reports of replays, which tenants send and operators read."""

from pathlib import Path
from typing import Any

import pytest

from gateway.intake.keys.key_file import KeyFile
from shared.bus.memory import MemoryBus
from tests.support.gateway.http import LiveGateway, live_gateway

REPORT: dict[str, Any] = {
    "model": "m-q4",
    "fingerprint": "b4c2a5088578ae95f6083227d7849976",
    "since": 1796083200,
    "share": 0.01,
    "seed": 0,
    "drawn": 20,
    "compared": 16,
    "equal": 12,
    "failed": 1,
    "median_token": 7,
    "median_character": 30,
    "median_margin": 2.5,
    "median_margin_is_at_least": True,
}


async def test_operators_read_the_reports_of_all_tenants(bus: MemoryBus, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys")
    alice, operator = (
        {"authorization": f"Bearer {key}"}
        for key in (file.add("alice"), file.add("ops", scopes=("operator",)))
    )
    async with live_gateway(bus, data_dir=tmp_path, keys_file=file.path) as gateway:
        sent = await gateway.http.post("/v1/replays", json=REPORT, headers=alice)
        listed = await gateway.http.get("/admin/v1/replays", headers=operator)
        refused = await gateway.http.get("/admin/v1/replays", headers=alice)

    assert sent.json() in listed.json()["data"]
    assert (sent.json()["tenant"], sent.json()["report"]) == ("alice", REPORT)
    assert refused.status_code == 403


@pytest.mark.parametrize(
    ("change", "param"),
    [({"equal": 17}, "equal"), ({"failed": 5}, "drawn"), ({"share": 0}, "share")],
)
async def test_a_report_that_contradicts_itself_is_refused(
    gateway: LiveGateway, change: dict[str, Any], param: str
) -> None:
    answer = await gateway.http.post("/v1/replays", json={**REPORT, **change})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

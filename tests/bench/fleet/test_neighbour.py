"""Other traffic beside a fleet."""

import json
import subprocess
import sys

import pytest

from bench.fleet import tables
from bench.fleet.neighbour import Beside, Neighbour
from bench.fleet.results import Results
from bench.fleet.users import Received
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import ROOT

RESULT = Neighbour(
    messages_per_s=100,
    seconds=20.0,
    loads=[
        Beside(
            load="64 users",
            num_users=64,
            received=Received(
                tokens_per_s=640.0, events_per_s=640.0, requests_per_s=13.0, ttft_p50_ms=150.0
            ),
            delay_p50_ms=2.5,
            delay_p99_ms=12.5,
            broker_cores=0.25,
            others=0.1,
        )
    ],
)


@pytest.mark.rabbit
def test_the_traffic_measures_the_delay_of_every_message(broker: Broker) -> None:
    command = [sys.executable, "-m", "bench.fleet.neighbour", f"--broker={broker.url}"]
    done = subprocess.run(
        [*command, "--messages-per-s=50", "--seconds=1"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )

    begin, said = done.stdout.splitlines()
    delays = json.loads(said)
    assert begin == ""
    assert 0 < delays["p50_ms"] <= delays["p99_ms"]


def test_a_result_is_read_as_it_was_written_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = Results({})
    found.add("neighbour", {}, RESULT)

    tables.show_neighbour(found.part("neighbour"))

    assert found.part("neighbour") == RESULT
    assert "12.5" in capsys.readouterr().out

"""The benchmark in miniature: a few seconds of each part, with real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.fleet.results import Results
from tests.support.deployment.processes import ROOT

pytestmark = pytest.mark.rabbit


CURVE = (
    "--gateways=1",
    "--workers=1",
    "--workers=2",
    "--other-tokens=8",
    "--seconds=1",
    "--step-ms=20",
)
STREAMS = ("--streams=40", "--stream-gateways=1", "--stream-workers=1", "--token-every-s=0.5")
QUEUES = ("--queues=2", "--queues=20", "--nodes=1", "--repeats=20", "--hold-s=3")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the results of a short run."""
    out = tmp_path_factory.mktemp("fleet")
    paths = [f"--out={out}", f"--costs={out / 'costs.json'}", f"--picture={out / 'picture.svg'}"]
    parts = [f"--only={part}" for part in ("curve", "streams", "queues")]
    command = [sys.executable, "-m", "bench.fleet", *parts, *paths, *CURVE, *STREAMS, *QUEUES]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return out


def test_the_curve_is_drawn(measured: Path) -> None:
    assert (measured / "picture.svg").read_text().startswith("<?xml")


def test_workers_join_and_leave(measured: Path) -> None:
    curve = Results.read(measured / "fleet.json").part("curve")

    assert [point.num_workers for point in curve.points] == [1, 1, 2, 2, 2]
    assert len(curve.joined_s) == curve.num_left == 1
    assert all(point.received.tokens_per_s > 0 for point in curve.points if point.answer_tokens)


def test_streams_are_open_at_once(measured: Path) -> None:
    streams = Results.read(measured / "fleet.json").part("streams")

    assert (streams.num_streams, streams.num_gateways) == (40, 1)
    assert streams.events_per_s > 0
    assert streams.stream_erlang_processes > 1


def test_queues_and_jobs_pass_through_the_broker(measured: Path) -> None:
    queues = Results.read(measured / "fleet.json").part("queues")

    assert [point.num_present for point in queues.queues] == [2, 20]
    assert all(point.per_s > 0 for point in (*queues.queues, *queues.jobs))

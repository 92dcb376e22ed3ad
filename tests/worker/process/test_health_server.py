"""What the health port logs about clients that misbehave and about its own failures."""

import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import NoReturn

import pytest

from shared.settings import Listener
from shared.telemetry import floods
from shared.telemetry.floods import MAX_LINES
from shared.telemetry.metrics import PROCESS
from tests.support.deployment.processes import free_port
from worker.process.health_server import HealthServer

NUM_TOO_MANY = 10
_RESETS_AT_ONCE = struct.pack("ii", 1, 0)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def server(port: int) -> Iterator[HealthServer]:
    with HealthServer(Listener("127.0.0.1", port)) as server:
        yield server


def send_half_a_head(port: int) -> None:
    """Send a part of a request's head and reset the connection."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS_AT_ONCE)
        client.sendall(b"GET /li")


def num_left_out() -> float:
    labels = {"event": "health request failed"}
    return PROCESS.registry.get_sample_value("warren_log_lines_left_out_total", labels) or 0.0


@pytest.mark.usefixtures("server")
def test_half_sent_heads_are_log_lines_and_not_more_than_a_few(
    port: int,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_one_window = floods.Limiter(
        floods.write_summary, clock=lambda: 0.0, later=lambda _delay_s, _summarise: None
    )
    monkeypatch.setattr(floods, "LINES", in_one_window)
    before = num_left_out()

    for _ in range(MAX_LINES + NUM_TOO_MANY):
        send_half_a_head(port)
    while num_left_out() < before + NUM_TOO_MANY:  # each connection has a thread of its own
        time.sleep(0.01)

    lines = [vars(one) for one in caplog.records]
    assert [line["msg"] for line in lines] == ["health request failed"] * MAX_LINES
    assert {line["address"] for line in lines} == {"127.0.0.1"}
    assert not any(line["exc_info"] for line in lines)
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_of_the_worker_is_an_incident(
    server: HealthServer,
    port: int,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> NoReturn:
        raise ValueError("odd")

    server._app.states = {"/live": fail}

    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/live")
    caught.value.close()

    assert caught.value.code == 500
    [line] = caplog.records
    assert (line.message, line.exc_info is not None) == ("health request failed", True)
    assert "Traceback" not in capsys.readouterr().err

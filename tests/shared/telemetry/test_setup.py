"""Log lines: structured, with the request's id, and silent where libraries print bodies.
Spans: sent to the endpoint that the settings name."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from shared.bus.memory import MemoryBus
from shared.telemetry.setup import JsonFormatter, console_formatter
from tests.support.gateway.http import chat_body, live_gateway
from tests.support.otlp import Collector, serving

SCRIPT = """
import logging
from shared.telemetry import setup
from shared.settings import WorkerSettings
setup.configure(WorkerSettings(log_format="json", log_level="debug"), "warren-test")
logging.getLogger("worker.jobs.run").info("job failed", extra={"request_id": "r1"})
logging.getLogger("uvicorn.error").info("Started")
logging.getLogger("aiormq.connection").error("returned: %s", "a prompt")
logging.getLogger("aio_pika.queue").debug("body: %s", "a prompt")
"""

EVENTS = ("job started", "job taken over", "worker ready")
CONSOLE_SCRIPT = """
import logging, sys
from shared.telemetry import requests, setup
from shared.settings import WorkerSettings
setup.configure(
    WorkerSettings(log_format="console", log_level=sys.argv[1]),
    "warren-test",
)
requests.write_line("job started", None, {"request_id": "r1", "attempt": 1})
requests.write_line("job taken over", None, {"request_id": "r1", "attempt": 2}, is_warning=True)
logging.getLogger("worker").info("worker ready", extra={"request_id": "r1"})
"""

SPAN_SCRIPT = """
import sys
from opentelemetry import trace
from shared.telemetry import requests, setup
from shared.settings import WorkerSettings
setup.configure(WorkerSettings(otlp_endpoint=sys.argv[1]), "warren-test")
requests.tracer.start_span("worker.queue").end()
trace.get_tracer_provider().shutdown()
"""


METRICS_SCRIPT = """
import sys
from opentelemetry import metrics
from gateway.metrics import GenAiMetrics
from shared.telemetry import setup
from shared.settings import GatewaySettings
setup.configure(GatewaySettings(otlp_endpoint=sys.argv[1]), "warren-test")
GenAiMetrics().record(
    "chatcmpl-1", "m", duration_s=2.0, first_token_s=0.5, num_prompt_tokens=7, num_tokens=4,
    error_code=None,
)
metrics.get_meter_provider().shutdown()
"""
GEN_AI = (
    b"gen_ai.server.time_to_first_token",
    b"gen_ai.server.time_per_output_token",
    b"gen_ai.server.request.duration",
    b"gen_ai.client.token.usage",
    b"gen_ai.operation.name",
    b"gen_ai.token.type",
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with serving() as collector:
        yield collector


@pytest.fixture(scope="module")
def lines() -> list[str]:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    return run.stderr.splitlines()


def test_a_line_is_json_with_its_request_id(lines: list[str]) -> None:
    record = json.loads(lines[0])

    assert (record["event"], record["request_id"], record["level"]) == ("job failed", "r1", "info")
    assert record["logger"] == "worker.jobs.run"


def test_normal_events_of_uvicorn_do_not_look_like_errors(lines: list[str]) -> None:
    _, line = map(json.loads, lines)

    assert (line["event"], line["logger"], line["level"]) == ("Started", "uvicorn", "info")


def test_libraries_that_print_bodies_are_silent(lines: list[str]) -> None:
    assert "a prompt" not in "".join(lines)


@pytest.mark.parametrize(
    ("level", "events"),
    [
        ("info", ["job started", "job taken over", "worker ready"]),
        ("notice", ["job taken over", "worker ready"]),
        ("warning", ["job taken over"]),
        ("error", []),
    ],
)
def test_lines_about_jobs_are_readable_text_and_only_warnings_from_notice_on(
    level: str, events: list[str]
) -> None:
    command = [sys.executable, "-c", CONSOLE_SCRIPT, level]
    run = subprocess.run(command, capture_output=True, text=True, check=True)

    lines = run.stderr.splitlines()
    assert [event for event in EVENTS if event in run.stderr] == events
    assert len(lines) == len(events)
    assert all("request_id=r1" in line for line in lines)


def test_a_line_with_a_field_that_is_no_text_is_json_all_the_same() -> None:
    record = logging.makeLogRecord({"msg": "odd", "path": "\ud800", "kind": object})

    line = json.loads(JsonFormatter().format(record))

    assert (line["event"], line["path"]) == ("odd", "\ud800")
    assert "object" in line["kind"]


ESCAPES = (
    "\x1b[2J",
    "\x1b]52;c;cm0=\x07",
    "\x9b2J",
    "\x9d0;PWNED\x9c",
    "\r\x7f\b",
    "\u202e",
    "\ud800",
)


@pytest.mark.parametrize("formatter", [JsonFormatter(), console_formatter()], ids=["json", "text"])
@pytest.mark.parametrize("escape", ESCAPES, ids=ascii)
def test_no_value_controls_the_terminal(formatter: logging.Formatter, escape: str) -> None:
    error = ValueError(escape)
    record = logging.makeLogRecord(
        {"msg": f"a{escape}", "path": f"/{escape}", "names": [escape], "kind": error}
        | {escape: "a name", "of": {escape: 1}, "levelname": "INFO", "name": "test"}
        | {"exc_info": (ValueError, error, None)}
    )

    text = formatter.format(record)

    assert all(line.isprintable() for line in text.split("\n"))
    assert "PWNED" in text or "PWNED" not in escape, "what is escaped is not lost"


async def test_no_request_controls_the_terminal_of_its_gateway(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    escape = "\x1b]0;PWNED\x07\x1b[2J\x9b2J\n"
    async with MemoryBus() as bus, live_gateway(bus) as gateway:
        await gateway.http.get(f"/{quote(escape)}")
        await gateway.http.get(f"/v1/models/{quote(escape)}")
        await gateway.http.post(
            "/v1/chat/completions",
            json=chat_body(model=escape),
            headers={b"idempotency-key": b"\x9b"},
        )

    lines = [console_formatter().format(record) for record in caplog.records]
    assert len(lines) >= 3
    assert any("PWNED" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_spans_go_to_the_configured_endpoint(collector: Collector) -> None:
    subprocess.run([sys.executable, "-c", SPAN_SCRIPT, collector.url], check=True)

    ((path, body),) = collector.posts
    assert path == "/v1/traces"
    assert b"worker.queue" in body
    assert b"warren-test" in body


def test_metrics_of_generative_ai_go_to_their_endpoint(collector: Collector) -> None:
    subprocess.run([sys.executable, "-c", METRICS_SCRIPT, collector.url], check=True)

    assert {path for path, _ in collector.posts} == {"/v1/metrics"}
    body = b"".join(body for _, body in collector.posts)
    assert [name for name in GEN_AI if name not in body] == []

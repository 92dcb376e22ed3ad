"""The doctor's findings about healthy deployments, and about deployments with faults."""

import asyncio
import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from yarl import URL

from cli.doctor.broker import _permissions, check_broker, check_management
from cli.doctor.command import _served_name
from cli.doctor.findings import Finding
from cli.doctor.gateway import check_gateway
from cli.main import app
from infra.rabbitmq.worker_account import definitions
from shared import topology
from shared.bus.rabbit import RabbitBus
from shared.settings import WorkerSettings
from tests.infra.test_rabbitmq_definitions import DEFINITIONS
from tests.support.deployment.broker import Broker, RabbitNode
from tests.worker.checkpoints.gguf_files import FOREIGN, write_tiny_gguf

NOBODY = "amqp://worker:secret@127.0.0.1:1/warren"
FREE_BYTES = 8 << 30


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def run(*args: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status and the findings by their checks."""
    done = CliRunner().invoke(app, ["doctor", "--json", *args], catch_exceptions=False)
    return done.exit_code, {finding["check"]: finding for finding in json.loads(done.stdout)}


def test_a_machine_without_a_deployment_has_no_failures() -> None:
    status, found = run()

    assert status == 0
    assert {found[check]["status"] for check in ("broker", "gateway")} == {"skipped"}
    assert found["secret"]["status"] == "warning"
    assert found["device"]["status"] == found["software"]["status"] == "ok"
    assert "GiB are free" in found["memory"]["detail"] or "downloaded" in found["model"]["detail"]


def test_the_settings_of_a_worker_need_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARREN_DATA_DIR", raising=False)
    _, found = run(f"--broker={NOBODY}", "--model=no-such-model")
    _, of_gateway = run(f"--broker={NOBODY}", "--model=no-such-model", "--port=8000")

    assert found["secret"]["status"] == "skipped"
    assert of_gateway["secret"]["status"] == "warning"


def test_every_failure_has_a_remedy_and_no_secret(tmp_path: Path) -> None:
    management = tmp_path / "management.url"
    management.write_text("http://operator:secret@127.0.0.1:1\n")

    status, found = run(
        f"--broker={NOBODY}",
        "--url=http://127.0.0.1:1/v1",
        f"--management-file={management}",
        f"--keys-file={tmp_path / 'absent'}",
        "--model=no-such-model",
    )

    failed = {check for check, finding in found.items() if finding["status"] == "failure"}
    assert status == 1
    assert failed == {"API keys", "broker", "gateway", "management", "model"}
    assert all(found[check]["remedy"] for check in failed)
    assert "secret" not in json.dumps([found[check] for check in failed])


def test_a_keys_file_with_which_no_gateway_starts_has_failed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("00aa alice secret scopes=typo\n")

    _, found = run(f"--keys-file={keys}", "--model=no-such-model", "--url=http://127.0.0.1:1")

    assert found["API keys"]["status"] == "failure"
    assert "keys:1:" in found["API keys"]["detail"]


def test_what_is_checked_is_a_heading() -> None:
    done = CliRunner().invoke(app, ["doctor", "--model=no-such-model", "--url=http://127.0.0.1:1"])

    headings = [line for line in done.stdout.splitlines() if line[0].isupper()]
    assert headings == ["This machine, with its own settings", "Broker", "Gateway"]


def test_a_line_for_people_has_the_remedy_at_its_end() -> None:
    done = CliRunner().invoke(app, ["doctor", f"--broker={NOBODY}"])

    (line,) = [line for line in done.stdout.splitlines() if " broker " in line]
    assert line.startswith("failure  broker       127.0.0.1:1 cannot be reached")
    assert line.endswith("To do: start RabbitMQ, or correct host and port of --broker")


def test_a_url_that_is_not_escaped_is_a_finding() -> None:
    found = asyncio.run(check_broker("amqp://worker:p/ss@broker/warren", "m"))

    assert [finding.status for finding in found] == ["failure"]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/models/x.gguf", "x"),
        ("/models/my model", "/models/my model"),
    ],
)
def test_the_queue_is_that_of_the_name_that_clients_use(model: str, name: str) -> None:
    assert _served_name(WorkerSettings(model=model)) == name
    assert _served_name(WorkerSettings(model=model, served_name="mine")) == "mine"


def test_a_gguf_file_is_looked_at_and_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "no.gguf").write_bytes(b"text")
    foreign = write_tiny_gguf(tmp_path / "m.gguf", architecture=FOREIGN)
    damaged = write_tiny_gguf(tmp_path / "d.gguf", without="blk.1.ffn_down.weight")

    _, found = run(f"--model={foreign}", "--device=cpu")
    _, refused = run(f"--model={tmp_path / 'no.gguf'}", "--device=cpu")
    _, lacking = run(f"--model={damaged}", "--device=cpu")

    assert found["model"]["status"] == "ok"
    assert found["model"]["detail"].endswith("runs through transformers")
    assert refused["model"]["status"] == lacking["model"]["status"] == "failure"
    assert lacking["model"]["detail"].endswith("no tensor blk.1.ffn_down.weight")
    assert not (tmp_path / "cache" / "warren" / "converted").exists()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a small GPU, as far as torch tells."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Small GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 << 20, 1 << 30))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("device", "status", "shown"),
    [
        ("auto", "ok", "Small GPU, .* Triton kernels"),
        ("cuda:0", "ok", "Small GPU"),
        ("cpu", "ok", "^[0-9]+ CPU cores"),
        ("cuda:1", "failure", "no device 'cuda:1'"),
        ("gpu", "failure", "no device 'gpu'"),
    ],
)
def test_the_device_is_the_one_of_the_settings(device: str, status: str, shown: str) -> None:
    _, found = run(f"--device={device}", "--model=no-such-model")

    assert found["device"]["status"] == status
    assert re.search(shown, found["device"]["detail"])


def write_hollow_model(directory: Path, model_type: str) -> Path:
    """A model whose weights fit into `FREE_BYTES` in 16 bits, but not in 32, and take no room on
    the disk."""
    directory.mkdir()
    num_bytes = FREE_BYTES // 8 * 6
    tensor = {"dtype": "BF16", "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    header += b" " * (-len(header) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)
    config = {"model_type": model_type, "hidden_act": "silu"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.parametrize(("model_type", "helps"), [("llama", True), ("phi", False)])
def test_weights_are_packed_only_if_the_model_runs_natively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, helps: bool
) -> None:
    monkeypatch.setattr("worker.model.loading.free_bytes", lambda: FREE_BYTES)
    model = write_hollow_model(tmp_path / "m", model_type)

    _, found = run(f"--model={model}", "--device=cpu", "--dtype=float32")
    _, as_stored = run(f"--model={model}", "--device=cpu")

    assert found["memory"]["status"] == "warning"
    assert as_stored["memory"]["status"] == "ok"
    assert ("--weight-format q4_1" in found["memory"]["remedy"]) == helps
    assert "a smaller --model, or a machine" in found["memory"]["remedy"]


def test_a_model_that_a_worker_would_refuse_is_a_failure(tmp_path: Path) -> None:
    import transformers

    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model("rwkv", **sizes)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")

    _, found = run(f"--model={tmp_path}", "--device=cpu")

    assert found["model"]["status"] == "failure"
    assert found["model"]["detail"].startswith(
        "model type rwkv cannot be served: of its 2 layers 0 call a registered attention"
    )
    assert "docs/models.md" in found["model"]["remedy"]


@pytest.mark.usefixtures("gpu")
def test_the_memory_is_that_of_the_device(tmp_path: Path) -> None:
    model = write_hollow_model(tmp_path / "m", "llama")

    _, found = run(f"--model={model}", "--device=cuda:0")
    _, nowhere = run(f"--model={model}", "--device=cuda:1")

    assert found["memory"]["detail"].startswith("3.0 MiB are free on cuda:0, the weights need ")
    assert found["memory"]["remedy"] == "try a smaller --model, or a GPU with more memory"
    assert nowhere["memory"]["status"] == "failure"


class NotHttp(BaseRequestHandler):
    """Answers as a broker does."""

    def handle(self) -> None:
        self.request.recv(1024)
        self.request.sendall(b"AMQP\0\0\x09\x01")


def test_a_port_that_does_not_speak_http_is_a_finding() -> None:
    with ThreadingTCPServer(("127.0.0.1", 0), NotHttp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        found = [*check_gateway(url, None), *check_management(url, "warren")]
        server.shutdown()

    assert [(one.check, one.status) for one in found] == [
        ("gateway", "failure"),
        ("management", "failure"),
    ]


@pytest.mark.rabbit
@pytest.mark.parametrize("user", ["gateway", "worker", "publisher", "operator"])
async def test_the_shipped_accounts_may_do_what_their_sides_do(broker: Broker, user: str) -> None:
    async with RabbitBus(broker.url_of("worker")) as bus:
        await topology.declare_worker(bus, "doctor-test", "w")

    found = by_check(await check_broker(broker.url_of(user), "doctor-test"))

    assert found["broker"].status == "ok"
    assert found["broker"].detail.startswith("RabbitMQ ")
    assert found["permissions"].status == "ok", found["permissions"]
    if user in ("gateway", "operator"):
        assert "0 jobs wait, 0 workers take them" in found["queue"].detail


@pytest.mark.rabbit
async def test_a_worker_limited_to_models_is_checked_as_a_worker(
    broker: Broker, tmp_path: Path
) -> None:
    if not isinstance(broker, RabbitNode):
        pytest.skip("the broker is not this session's own")
    account = tmp_path / "account.json"
    account.write_text(json.dumps(definitions("doctor-limited", ["doctor-test"], "warren")))
    if "doctor-limited" not in broker.ctl("list_users"):
        broker.ctl("add_user", "doctor-limited", str(URL(broker.url).password))
    broker.ctl("import_definitions", str(account))

    found = by_check(await check_broker(broker.url_of("doctor-limited"), "doctor-test"))

    assert found["permissions"].status == "ok", found["permissions"]
    assert found["permissions"].detail.endswith("has the permissions of a worker")
    assert "0 workers take them" in found["queue"].detail


@pytest.mark.rabbit
async def test_what_an_account_may_not_do_is_named(broker: Broker) -> None:
    async with RabbitBus(broker.url_of("publisher")) as bus:
        found = await _permissions(bus, "gateway")

    assert found.status == "failure"
    assert "keep logs" in found.detail
    assert "publish jobs" not in found.detail


@pytest.mark.rabbit
async def test_a_wrong_password_is_a_finding(broker: Broker) -> None:
    wrong = broker.url_of("worker").replace("worker:", "worker:not-")

    (found,) = await check_broker(wrong, "m")

    assert found.status == "failure"
    assert "its password is wrong" in found.detail


@contextmanager
def management(answers: dict[str, Any]) -> Iterator[str]:
    """A management API for the user operator; yields its URL, which contains the password."""
    login = f"Basic {base64.b64encode(b'operator:p/ss').decode()}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path in answers and self.headers["Authorization"] == login
            body = json.dumps(answers.get(self.path)).encode()
            self.send_response(200 if is_known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://operator:p%2Fss@127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_missing_policies_and_alarms_are_found() -> None:
    node = {"name": "rabbit@a", "running": True}
    policies = [{"name": policy["name"]} for policy in DEFINITIONS["policies"]]
    good = {"/api/policies/%2F": policies, "/api/nodes": [node]}
    bad = {
        "/api/policies/%2F": policies[1:],
        "/api/nodes": [{**node, "mem_alarm": True}, {"name": "rabbit@b", "running": False}],
    }

    with management(good) as url:
        well = by_check(check_management(url, "/"))
        (refused,) = check_management(url.replace("operator", "nobody"), "/")
    with management(bad) as url:
        ill = by_check(check_management(url, "/"))

    assert {finding.status for finding in well.values()} == {"ok"}
    assert refused.status == "failure"
    assert ill["policies"].detail == "missing: warren-jobs"
    assert ill["alarms"].detail.endswith("rabbit@a: mem_alarm")
    assert ill["nodes"].detail == "not running: rabbit@b"


def test_the_url_of_the_management_api_is_read_from_a_file(tmp_path: Path) -> None:
    node = {"name": "rabbit@a", "running": True}
    with management({"/api/policies/warren": [], "/api/nodes": [node]}) as url:
        (tmp_path / "url").write_text(f"{url}\n")
        _, found = run(f"--management-file={tmp_path / 'url'}")

    assert found["nodes"]["status"] == "ok"


def test_a_file_that_cannot_be_read_is_named() -> None:
    done = CliRunner().invoke(app, ["doctor", "--management-file=/no/such/file"])

    assert done.exit_code == 1
    assert "/no/such/file cannot be read" in str(done.exception)


def test_the_management_api_must_answer() -> None:
    (found,) = check_management("http://127.0.0.1:1", "warren")

    assert found.status == "failure"

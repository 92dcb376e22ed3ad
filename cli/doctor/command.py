"""The command ``warren doctor``: checks a deployment, one line for each check."""

import asyncio
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.doctor.findings import Finding, Status, failure, ok, skipped, warning
from cli.doctor.web import Fetched, fetch
from cli.options import chosen, takes_settings
from cli.terminal import output
from shared import settings
from shared.errors import StartupError
from shared.host_memory import free_bytes
from shared.settings import GatewaySettings, WorkerSettings

_COLORS: dict[Status, str] = {
    "ok": "green",
    "warning": "yellow",
    "failure": "red",
    "skipped": "dim",
}
_MAX_SKEW_S = 5.0
_OTHER_FILES = 256


@takes_settings(GatewaySettings, WorkerSettings)
def doctor(
    url: Annotated[
        str | None, typer.Option(help="Gateway to check, such as http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key for the gateway.")
    ] = None,
    management: Annotated[
        str | None,
        typer.Option(
            help="RabbitMQ's management API, such as http://operator:PASSWORD@127.0.0.1:15672: "
            "checks policies, alarms and nodes, too."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    **options: Any,
) -> None:
    """Check a deployment with the settings of this machine, one line for each check.

    The exit status is 1 if a check fails; warnings do not count.

    [dim]warren doctor --broker-file worker.url --url http://127.0.0.1:8000[/]
    """
    gateway = settings.load(GatewaySettings, **chosen(GatewaySettings, options))
    worker = settings.load(WorkerSettings, **chosen(WorkerSettings, options))
    findings = []
    for finding in _checks(gateway, worker, url, api_key, management):
        findings.append(finding)
        if not as_json:
            _show(finding)
    if as_json:
        output.print_json(json.dumps([asdict(finding) for finding in findings]))
    if any(finding.status == "failure" for finding in findings):
        raise typer.Exit(1)


def _checks(
    gateway: GatewaySettings,
    worker: WorkerSettings,
    url: str | None,
    api_key: str | None,
    management: str | None,
) -> Iterator[Finding]:
    from cli.doctor.broker import check_broker, check_management, virtual_host

    yield ok("settings", "all variables and options are valid")
    yield _software()
    yield _open_files(gateway)
    yield _secret(gateway)
    yield _keys(gateway)
    yield from _model(worker)
    yield _device(worker)
    broker = worker.broker
    if broker is None:
        yield skipped("broker", "none is set: `warren serve` needs none")
    else:
        model = worker.served_name or Path(worker.model).name
        yield from asyncio.run(check_broker(broker.get_secret_value(), model))
    if management is not None:
        vhost = "warren" if broker is None else virtual_host(broker.get_secret_value())
        yield from check_management(management, vhost)
    if url is None:
        yield skipped("gateway", "name one with --url")
    else:
        yield from _gateway(url, api_key)


def _show(finding: Finding) -> None:
    color = _COLORS[finding.status]
    line = f"[{color}]{finding.status:8}[/] {finding.check:12} {escape(finding.detail)}"
    if finding.remedy:
        line += f". [bold]To do:[/] {escape(finding.remedy)}"
    output.print(line, soft_wrap=True)


def _software() -> Finding:
    found = [f"Python {platform.python_version()}"]
    for package in ("warren", "torch", "transformers"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    detail = ", ".join(found)
    if sys.version_info < (3, 11) or sys.version_info >= (3, 13):
        return warning("software", detail, "use Python 3.11 or 3.12")
    return ok("software", detail)


def _open_files(gateway: GatewaySettings) -> Finding:
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = gateway.max_connections + _OTHER_FILES
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        return warning(
            "open files",
            f"a process may open {allowed} files, {gateway.max_connections} connections need "
            f"{needed}",
            f"raise the limit (ulimit -n {needed}), or lower --max-connections",
        )
    return ok("open files", f"enough for {gateway.max_connections} connections")


def _secret(gateway: GatewaySettings) -> Finding:
    if gateway.secret is None:
        return warning(
            "secret",
            "none is set: streams cannot be resumed at another gateway or after a restart",
            "set WARREN_SECRET, the same on all gateways; `openssl rand -hex 32` generates one",
        )
    return ok("secret", "set")


def _keys(gateway: GatewaySettings) -> Finding:
    if gateway.keys_file is None:
        if gateway.allow_anonymous:
            return warning("API keys", "anyone may use the gateway", "set WARREN_KEYS_FILE")
        return ok("API keys", "none: the gateway listens on loopback addresses only")
    try:
        lines = gateway.keys_file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return failure(
            "API keys",
            f"{gateway.keys_file} cannot be read: {error}",
            "`warren keys add TENANT` creates the file",
        )
    num_keys = sum(1 for line in lines if line.partition("#")[0].strip())
    if not num_keys:
        return warning("API keys", f"{gateway.keys_file} has none", "`warren keys add TENANT`")
    return ok("API keys", f"{num_keys} in {gateway.keys_file}")


def _model(worker: WorkerSettings) -> Iterator[Finding]:
    try:
        from worker.checkpoints import store
        from worker.model.config import is_native, read_json_config
    except ModuleNotFoundError as error:
        yield skipped("model", f"{error.name} is not installed: no worker runs here")
        return
    if not store.is_here(worker.model):
        yield ok("model", f"{worker.model} is downloaded when a worker starts")
        return
    try:
        directory = store.resolve(worker.model)
        kind = "natively" if is_native(read_json_config(directory)) else "through transformers"
    except StartupError as error:
        yield failure("model", str(error), "correct --model, or run `warren pull`")
        return
    yield ok("model", f"{worker.model} in {directory} runs {kind}")
    needed = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    free = free_bytes()
    detail = f"{free:,} bytes are free, the checkpoint has {needed:,}"
    if needed > free:
        yield warning("memory", detail, "use --weight-format q4_1, or a machine with more memory")
    else:
        yield ok("memory", detail)


def _device(worker: WorkerSettings) -> Finding:
    try:
        import torch

        from worker.model.provision import native_obstacle
    except ModuleNotFoundError as error:
        return skipped("device", f"{error.name} is not installed: no worker runs here")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return ok("device", f"{name}, {free:,} of {total:,} bytes free, Triton kernels")
    if worker.device.startswith("cuda"):
        return failure(
            "device",
            f"torch {torch.__version__} finds no GPU for --device {worker.device}",
            "install NVIDIA's driver and a torch with CUDA, and give the container the GPU",
        )
    cores = len(os.sched_getaffinity(0))
    obstacle = native_obstacle(64, torch.float32, torch.device("cpu"))
    if obstacle is not None:
        return warning(
            "device",
            f"no GPU; {cores} CPU cores with slow reference kernels: {obstacle}",
            "install g++ or clang++, and use a processor with AVX2",
        )
    return ok("device", f"no GPU; {cores} CPU cores with native kernels")


def _gateway(url: str, api_key: str | None) -> Iterator[Finding]:
    url = url.rstrip("/").removesuffix("/v1")
    try:
        health = fetch(f"{url}/health")
    except (OSError, ValueError) as error:
        yield failure("gateway", f"{url} does not answer: {error}", "start it, or correct --url")
        return
    yield _health(url, health)
    yield _clock(health)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        listed = fetch(f"{url}/v1/models", headers)
    except (OSError, ValueError) as error:
        yield failure("models", f"{url}/v1/models does not answer: {error}", "see its log")
        return
    yield _models(listed, has_key=api_key is not None)


def _health(url: str, health: Fetched) -> Finding:
    try:
        status = json.loads(health.body)["status"]
    except (ValueError, KeyError, TypeError):
        return failure("gateway", f"{url} is not a gateway of Warren", "correct --url")
    if health.status == HTTPStatus.OK:
        return ok("gateway", f"{url} accepts requests")
    return failure(
        "gateway",
        f"{url} accepts no requests: {status}",
        "see the broker's checks" if status == "broker_unavailable" else "wait for its restart",
    )


def _clock(health: Fetched) -> Finding:
    """Deadlines are absolute times, which gateways write and workers read."""
    if "date" not in health.headers:
        return skipped("clock", "the gateway's answer has no date")
    skew_s = time.time() - parsedate_to_datetime(health.headers["date"]).timestamp()
    if abs(skew_s) > _MAX_SKEW_S:
        return failure(
            "clock",
            f"this machine's clock and the gateway's differ by {abs(skew_s):.0f} s: deadlines of "
            "jobs are absolute times",
            "synchronize both with NTP",
        )
    return ok("clock", "this machine's clock and the gateway's agree")


def _models(listed: Fetched, *, has_key: bool) -> Finding:
    if listed.status == HTTPStatus.UNAUTHORIZED:
        if has_key:
            return failure("models", "the gateway does not accept the API key", "check --api-key")
        return warning("models", "the gateway needs an API key", "set OPENAI_API_KEY")
    try:
        models = [model["id"] for model in json.loads(listed.body)["data"]]
    except (ValueError, KeyError, TypeError):
        return failure("models", f"/v1/models is answered {listed.status}", "see the gateway's log")
    if not models:
        return warning(
            "models", "no worker has announced itself", "start a worker on the same broker"
        )
    return ok("models", f"served: {', '.join(models)}")

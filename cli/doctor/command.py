"""The command ``warren doctor``: checks a deployment, one line for each check."""

import asyncio
import platform
import resource
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.doctor.findings import (
    Finding,
    FindingStatus,
    Subject,
    about,
    failure,
    ok,
    skipped,
    warning,
)
from cli.doctor.gateway import check_gateway
from cli.options import ApiKeyFile, chosen, chosen_key, takes_settings
from cli.terminal import output, print_json
from shared import settings
from shared.control_groups import usable_cpus
from shared.errors import StartupError
from shared.host_memory import readable_size
from shared.settings import CommonSettings, GatewaySettings, WorkerSettings

_COLORS: dict[FindingStatus, str] = {
    "ok": "green",
    "warning": "yellow",
    "failure": "red",
    "skipped": "dim",
}
_HEADINGS: dict[Subject, str] = {
    "machine": "This machine, with its own settings",
    "broker": "Broker",
    "gateway": "Gateway",
}
_OTHER_FILES = 256


@takes_settings(GatewaySettings, WorkerSettings)
def doctor(
    url: Annotated[
        str | None, typer.Option(help="Gateway to check, such as http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key for the gateway.")
    ] = None,
    api_key_file: ApiKeyFile = None,
    management: Annotated[
        str | None,
        typer.Option(
            help="URL of RabbitMQ's management API: checks policies, alarms and nodes, too. Other "
            "users of this machine can read it, so use --management-file if it has a password."
        ),
    ] = None,
    management_file: Annotated[
        Path | None,
        typer.Option(help="File that contains this URL: http://operator:PASSWORD@HOST:15672."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    **options: Any,
) -> None:
    """Check a deployment, one line for each check.

    This machine and the broker are checked with the settings of this machine. With --url and no
    settings, only the gateway is checked, which may run elsewhere. The exit status is 1 if a check
    fails; warnings do not count.

    warren doctor --broker file:worker.url --url http://127.0.0.1:8000
    """
    if management_file is not None:
        management = settings.secret_in(management_file)
    gateway = settings.load(GatewaySettings, **chosen(GatewaySettings, options))
    worker = settings.load(WorkerSettings, **chosen(WorkerSettings, options))
    findings: list[Finding] = []
    for finding in _checks(gateway, worker, url, chosen_key(api_key, api_key_file), management):
        if not as_json and (not findings or findings[-1].subject != finding.subject):
            output.print(_HEADINGS[finding.subject], style="bold")
        findings.append(finding)
        if not as_json:
            _show(finding)
    if as_json:
        print_json(findings)
    if any(finding.status == "failure" for finding in findings):
        raise typer.Exit(1)


def _checks(
    gateway: GatewaySettings,
    worker: WorkerSettings,
    url: str | None,
    api_key: str | None,
    management: str | None,
) -> Iterator[Finding]:
    has_settings = bool(gateway.model_fields_set or worker.model_fields_set)
    if url is None or has_settings:
        yield from _machine(gateway, worker)
    else:
        yield skipped("settings", "none are given beside --url: this machine is not checked")
    if url is None or has_settings or management is not None:
        yield from about("broker", _broker(worker, management))
    if url is None:
        yield from about("gateway", [skipped("gateway", "name one with --url")])
    else:
        yield from about("gateway", check_gateway(url, api_key))


def _machine(gateway: GatewaySettings, worker: WorkerSettings) -> Iterator[Finding]:
    yield ok("settings", "all variables and options are valid")
    yield _software()
    yield _open_files(gateway)
    yield _secret(gateway, worker)
    yield _keys(gateway)
    yield from _stores(gateway)
    yield from _sign_in(gateway)
    yield from _model(worker)
    yield _device(worker)


def _broker(worker: WorkerSettings, management: str | None) -> Iterator[Finding]:
    from cli.doctor.broker import check_broker, check_management, virtual_host

    broker = worker.broker
    if broker is None:
        yield skipped("broker", "none is set: `warren serve` needs none")
    else:
        yield from asyncio.run(check_broker(broker.get_secret_value(), _served_name(worker)))
    if management is not None:
        vhost = "warren" if broker is None else virtual_host(broker.get_secret_value())
        yield from check_management(management, vhost)


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
    if not (3, 11) <= sys.version_info < (3, 15):
        return warning("software", detail, "use Python 3.11, 3.12, 3.13 or 3.14")
    return ok("software", detail)


def _open_files(gateway: GatewaySettings) -> Finding:
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = gateway.max_connections + _OTHER_FILES
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        return warning(
            "open files",
            f"a process may open {allowed} files, {gateway.max_connections} connections need "
            f"{needed}",
            f"raise the limit (ulimit -n {needed}), or lower --max-requests",
        )
    return ok("open files", f"enough for {gateway.max_connections} connections")


def _secret(gateway: GatewaySettings, worker: WorkerSettings) -> Finding:
    if gateway.secret is None and _is_of_worker(gateway, worker):
        return skipped("secret", "the settings are those of a worker, which needs none")
    if gateway.secret is None:
        return warning(
            "secret",
            "none is set: streams cannot be resumed at another gateway or after a restart",
            "set WARREN_SECRET, the same on all gateways; `openssl rand -hex 32` generates one",
        )
    return ok("secret", "set")


def _is_of_worker(gateway: GatewaySettings, worker: WorkerSettings) -> bool:
    """Whether settings of a worker are given, and none of a gateway."""
    common = CommonSettings.model_fields.keys()
    return bool(worker.model_fields_set - common) and not gateway.model_fields_set - common


def _keys(gateway: GatewaySettings) -> Finding:
    if gateway.keys_file is None:
        if gateway.allow_anonymous:
            return warning("API keys", "anyone may use the gateway", "set WARREN_KEYS_FILE")
        return ok("API keys", "none: the gateway listens on loopback addresses only")
    from gateway.intake.keys.key_file import read_keys

    try:
        num_keys = len(read_keys(gateway.keys_file))
    except StartupError as error:
        remedy = "correct that line" if gateway.keys_file.exists() else "`warren keys add TENANT`"
        return failure("API keys", error.message, remedy)
    if not num_keys:
        return warning("API keys", f"{gateway.keys_file} has none", "`warren keys add TENANT`")
    return ok("API keys", f"{num_keys} in {gateway.keys_file}")


def _stores(gateway: GatewaySettings) -> Iterator[Finding]:
    try:
        from cli.doctor.stores import check_stores
    except ModuleNotFoundError as error:
        yield skipped("data dir", f"{error.name} is not installed: no gateway runs here")
        return
    yield from check_stores(gateway)


def _sign_in(gateway: GatewaySettings) -> Iterator[Finding]:
    if gateway.oidc_file is None:
        return
    try:
        from cli.doctor.sign_in import check_sign_in
    except ModuleNotFoundError as error:
        yield skipped("sign-in", f"{error.name} is not installed: no gateway runs here")
        return
    yield from check_sign_in(gateway)


def _model(worker: WorkerSettings) -> Iterator[Finding]:
    try:
        from worker.checkpoints import store
        from worker.model.config import read_json_config
        from worker.model.loading import device_named, rehearse, weight_room
        from worker.model.weights.sources import open_source
    except ModuleNotFoundError as error:
        yield skipped("model", f"{error.name} is not installed: no worker runs here")
        return
    if not store.is_here(worker.model):
        yield ok("model", f"{worker.model} is downloaded when a worker starts")
        return
    try:
        directory = store.resolve(worker.model)
        config, source = read_json_config(directory), open_source(directory)
    except (StartupError, OSError) as error:
        yield failure("model", str(error), "correct --model, or run `warren pull`")
        return
    try:
        how = rehearse(directory, worker.weight_format)
        yield ok("model", f"{worker.model} in {directory} runs {how}")
    except StartupError as error:
        remedy = "download it again, or choose another --model: docs/models.md lists some"
        yield failure("model", str(error), remedy)
    formats = {
        "dtype": worker.dtype,
        "weight_format": worker.weight_format,
        "kernels": worker.kernels,
    }
    try:
        device = device_named(worker.device)
        needed, free, remedy = weight_room(config, source, device, **formats)
    except StartupError as error:
        yield failure("memory", str(error), "correct --device, --dtype or --model")
        return
    detail = f"{readable_size(free)} are free on {device}, the weights need {readable_size(needed)}"
    yield warning("memory", detail, remedy) if needed > free else ok("memory", detail)


def _served_name(worker: WorkerSettings) -> str:
    """The name in the model's queues. A name that no client could send is a finding of its own."""
    if worker.served_name is not None:
        return worker.served_name
    try:
        from worker.checkpoints import store

        return store.served_name(worker.model)
    except (ModuleNotFoundError, StartupError):
        return worker.model


def _device(worker: WorkerSettings) -> Finding:
    try:
        import torch

        from worker.model.loading import device_named
        from worker.model.provision import native_obstacle
    except ModuleNotFoundError as error:
        return skipped("device", f"{error.name} is not installed: no worker runs here")
    try:
        device = device_named(worker.device)
    except StartupError as error:
        return failure(
            "device",
            f"torch {torch.__version__}: {error}",
            "correct --device, or install NVIDIA's driver and a torch with CUDA, and give the "
            "container the GPU",
        )
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        return ok(
            "device",
            f"{name}, {readable_size(free)} of {readable_size(total)} free, Triton kernels",
        )
    cores = f"{usable_cpus()} CPU cores"
    if worker.device == "auto":
        cores = f"no GPU; {cores}"
    obstacle = native_obstacle(64, torch.float32, device)
    if obstacle is not None:
        return warning(
            "device",
            f"{cores} with slow reference kernels: {obstacle}",
            "install g++ or clang++, and use a processor with AVX2, or ARM64 with libsimde-dev",
        )
    return ok("device", f"{cores} with native kernels")

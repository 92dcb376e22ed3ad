"""The commands ``warren status`` and ``warren top``: the status of a deployment in the terminal."""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.options import DEFAULT_URL, GatewayUrl
from cli.runtime import needs
from cli.terminal import output
from shared.errors import StartupError, Unavailable

if TYPE_CHECKING:
    import httpx

_PATH = "/admin/v1/status"
_TIMEOUT_S = 10.0
_SHORT_ID = 8
_BAR_CELLS = 10

ApiKey = Annotated[
    str | None,
    typer.Option(envvar="OPENAI_API_KEY", help="API key with the scope operator."),
]
ApiKeyFile = Annotated[Path | None, typer.Option(help="File that contains the API key.")]


def status(
    url: GatewayUrl = DEFAULT_URL,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the gateway's answer as JSON.")
    ] = False,
) -> None:
    """Show live workers, queues, streams and tenants, as a gateway sees them.

    [dim]warren status --url http://127.0.0.1:8000[/]
    """
    with _connect(url, api_key, api_key_file) as client:
        seen = _fetch(client)
    if as_json:
        output.print_json(json.dumps(seen))
    else:
        output.print(render(seen))


def top(
    url: GatewayUrl = DEFAULT_URL,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show the same as `status`, again and again, until Ctrl-C.

    [dim]warren top --url http://127.0.0.1:8000[/]
    """
    with _connect(url, api_key, api_key_file) as client:
        seen: RenderableType = render(_fetch(client))  # a wrong key or URL ends the command
        with Live(seen, console=output, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    live.update(seen, refresh=True)
                    time.sleep(interval)
                    try:
                        seen = render(_fetch(client))
                    except Unavailable as error:
                        seen = Text(f"{error.message}; trying again ...", style="red")
            except KeyboardInterrupt:
                pass


def render(seen: dict[str, Any]) -> RenderableType:
    """The gateway's status as tables."""
    gateway, now = seen["gateway"], time.time()
    style = "green" if gateway["status"] == "ok" else "red"
    head = Text.assemble(
        ("Warren ", "bold"),
        gateway["version"],
        "   gateway ",
        (gateway["status"].replace("_", " "), style),
        f", up {duration(now - gateway['started_at'])}, {gateway['num_requests']} requests"
        f"   {seen['num_dead_letters']} dead letters",
    )
    queues = [
        queue for queue in seen["queues"] if queue["lane"] != "suspect" or queue["num_waiting"]
    ]
    return Group(
        head,
        Text(),
        _table(
            "Workers",
            ("id", "model", "state", ">running", ">waiting", "kv cache", ">answered", ">uptime"),
            [_worker(worker, now) for worker in seen["workers"]],
        ),
        _table(
            "Queues",
            ("model", "class", ">waiting", ">oldest", ">consumers"),
            [
                (
                    queue["model"],
                    queue["lane"],
                    str(queue["num_waiting"]),
                    duration(queue["oldest_s"]),
                    str(queue["num_consumers"]),
                )
                for queue in queues
            ],
        ),
        _table(
            f"Streams of this gateway ({seen['num_streams']})",
            ("id", "tenant", "model", "state", "worker", ">tokens", ">age"),
            [_stream(stream, now) for stream in seen["streams"]],
        ),
        _table(
            "Tenants of this gateway",
            ("tenant", ">requests", ">in flight", ">failed", ">prompt", ">cached", ">generated"),
            [_tenant(tenant) for tenant in seen["tenants"]],
        ),
        _table(
            "API keys with limits",
            ("id", "tenant", "label", ">requests/min", ">tokens/min", ">running"),
            [_key(key) for key in seen.get("keys", ()) if key["num_running"] is not None],
        ),
    )


def duration(seconds: float | None) -> str:
    """A duration in at most two units; "-" if it is unknown."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _worker(worker: dict[str, Any], now: float) -> Sequence[RenderableType]:
    uptime_s = None if worker["started_at"] is None else now - worker["started_at"]
    return (
        worker["id"][:_SHORT_ID],
        worker["model"],
        Text(worker["state"], style="green" if worker["state"] == "serving" else "yellow"),
        f"{worker['num_running']} of {worker['max_num_seqs']}",
        str(worker["num_waiting"]),
        _bar(worker["kv_usage"]),
        str(worker["num_answered"]),
        duration(uptime_s),
    )


def _stream(stream: dict[str, Any], now: float) -> Sequence[RenderableType]:
    state = stream["state"]
    if stream["num_crashes"]:
        state += f", {stream['num_crashes']} lost"
    elif stream["num_workers"] > 1:
        state += ", moved"
    return (
        stream["id"].replace("_", "-").rpartition("-")[2][:_SHORT_ID],
        stream["tenant"] or "anonymous",
        stream["model"],
        state,
        (stream["worker"] or "-")[:_SHORT_ID],
        str(stream["num_tokens"]),
        duration(now - stream["created_at"]),
    )


def _tenant(tenant: dict[str, Any]) -> Sequence[RenderableType]:
    names = ("requests", "in_flight", "failed", "prompt_tokens", "cached_tokens")
    counts = [f"{tenant[f'num_{name}']:,}" for name in (*names, "generated_tokens")]
    return (tenant["tenant"] or "anonymous", *counts)


def _key(key: dict[str, Any]) -> Sequence[RenderableType]:
    uses = (
        ("num_requests", "requests_per_minute"),
        ("num_tokens", "tokens_per_minute"),
        ("num_running", "max_concurrent"),
    )
    limits = [f"{key[used]:,} of {key[most]:,}" if key[most] else "-" for used, most in uses]
    return (key["id"], key["tenant"], key["label"], *limits)


def _bar(share: float) -> Text:
    full = round(share * _BAR_CELLS)
    style = "yellow" if share > 0.9 else "green"
    return Text.assemble(("━" * full, style), ("─" * (_BAR_CELLS - full), "dim"), f" {share:4.0%}")


def _table(
    title: str, columns: Iterable[str], rows: Sequence[Sequence[RenderableType]]
) -> RenderableType:
    """``columns`` are titles; those of numbers begin with ">"."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(
            column.lstrip(">"),
            justify="right" if column.startswith(">") else "left",
            header_style="dim",
            no_wrap=True,
        )
    for row in rows:
        table.add_row(*row)
    return Group(table, Text("  none\n" if not rows else "", style="dim"))


def _connect(url: str, api_key: str | None, api_key_file: Path | None) -> "httpx.Client":
    with needs("gateway"):
        from cli.gateway_client import connect
    if api_key_file is not None:
        try:
            api_key = api_key_file.read_text().strip()
        except OSError as error:
            raise StartupError(f"{api_key_file} cannot be read: {error.strerror}") from None
    return connect(url, api_key)


def _fetch(client: "httpx.Client") -> dict[str, Any]:
    """The gateway's status. Raises `Unavailable` if it does not answer, and the error that it
    answers."""
    from cli.gateway_client import asked

    seen: dict[str, Any] = asked(client, "GET", _PATH, timeout=_TIMEOUT_S).json()
    return seen

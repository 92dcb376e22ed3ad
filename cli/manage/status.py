"""The commands ``warren status`` and ``warren top``: the status of a deployment in the terminal."""

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from cli.gateway_client import answer_of, connect, request_json
from cli.options import GatewayAccess, takes_gateway
from cli.tables import Cell, Column, FittedTable, print_tables
from cli.terminal import number_of, output, print_json
from shared.errors import Unavailable

_PATH = "/admin/v1/status"
_TIMEOUT_S = 10.0
_RANDOM_ID = re.compile(r"(?:^|[-_])([0-9a-f]{8})[0-9a-f]{16,}$")
_BAR_CELLS = 10
_FORGOTTEN_AFTER_S = 15.0
_INTERVAL_S = 15.0
"""Between a gateway's samples."""

_WORKERS = (
    Column("id"),
    Column("model"),
    Column("state"),
    Column("engine", rank=4),
    Column("running", is_number=True),
    Column("waiting", is_number=True),
    Column("kv cache", rank=1),
    Column("answered", is_number=True, rank=3),
    Column("uptime", is_number=True, rank=2),
)
_QUEUES = (
    Column("model"),
    Column("class"),
    Column("waiting", is_number=True),
    Column("oldest", is_number=True),
    Column("consumers", is_number=True, rank=1),
)
_STREAMS = (
    Column("id"),
    Column("tenant"),
    Column("model"),
    Column("state"),
    Column("worker"),
    Column("tokens", is_number=True, rank=1),
    Column("age", is_number=True, rank=2),
)
_TENANTS = (
    Column("tenant"),
    Column("requests", is_number=True),
    Column("in flight", is_number=True, rank=3),
    Column("failed", is_number=True, rank=4),
    Column("cancelled", is_number=True, rank=6),
    Column("prompt", is_number=True, rank=2),
    Column("cached", is_number=True, rank=5),
    Column("generated", is_number=True, rank=1),
)
_KEYS = (
    Column("id"),
    Column("tenant"),
    Column("label", rank=4),
    Column("requests/min", is_number=True, rank=2),
    Column("tokens/min", is_number=True, rank=3),
    Column("running", is_number=True, rank=1),
)


@takes_gateway
def status(
    gateway: GatewayAccess,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the gateway's answer as JSON.")
    ] = False,
) -> None:
    """Show live workers, queues, streams and tenants, as a gateway sees them.

    warren status --url http://127.0.0.1:8000
    """
    seen = answer_of(gateway, "GET", _PATH, timeout=_TIMEOUT_S)
    if as_json:
        print_json(seen)
    else:
        # Piped output keeps whole ids, because a program may search it for them.
        print_tables(render(seen, short_id if output.file.isatty() else str))


@takes_gateway
def top(
    gateway: GatewayAccess,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show the output of `warren status` continuously, until Ctrl-C.

    warren top --url http://127.0.0.1:8000
    """
    with connect(*gateway) as client:
        ask = partial(request_json, client, "GET", _PATH, timeout=_TIMEOUT_S)
        gateways = Gateways()
        # A wrong key or URL ends the command.
        seen: RenderableType = render(gateways.merged(ask()))
        with Live(seen, console=output, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    live.update(seen, refresh=True)
                    time.sleep(interval)
                    try:
                        seen = render(gateways.merged(ask()))
                    except Unavailable as error:
                        seen = Text(f"{error.message}; trying again ...", style="red")
            except KeyboardInterrupt:
                pass


class Gateways:
    """The last status of each gateway, because behind a proxy the gateway may change with each
    answer."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, dict[str, Any]]] = {}

    def merged(self, seen: dict[str, Any]) -> dict[str, Any]:
        """``seen`` with the streams, tenants and requests of all gateways."""
        now = time.monotonic()
        self._heard[seen["gateway"].get("id", "")] = (now, seen)
        self._heard = {
            name: (at, status)
            for name, (at, status) in self._heard.items()
            if now - at < _FORGOTTEN_AFTER_S
        }
        statuses = [status for _, status in self._heard.values()]
        streams = {stream["id"]: stream for status in statuses for stream in status["streams"]}
        tenants: dict[str, Counter[str]] = {}
        for status in statuses:
            for tenant in status["tenants"]:
                counts = {name: count for name, count in tenant.items() if name != "tenant"}
                tenants.setdefault(tenant["tenant"], Counter()).update(counts)
        num_requests = sum(status["gateway"]["num_requests"] for status in statuses)
        return {
            **seen,
            "gateway": {**seen["gateway"], "num_requests": num_requests},
            "num_gateways": len(statuses),
            "streams": sorted(streams.values(), key=itemgetter("created_at")),
            "num_streams": sum(status["num_streams"] for status in statuses),
            "tenants": [{"tenant": name, **tenants[name]} for name in sorted(tenants)],
            "recent": _merged_rates([status.get("recent") for status in statuses]),
        }


def _merged_rates(recent: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The rates of several gateways together. Gateways of earlier versions measure none."""
    measured = [one for one in recent if one is not None]
    if not measured:
        return None
    first_tokens_s = [one["first_token_s"] for one in measured if one["first_token_s"] is not None]
    return {
        "tokens_per_s": sum(one["tokens_per_s"] for one in measured),
        "num_first_tokens": sum(one["num_first_tokens"] for one in measured),
        "first_token_s": max(first_tokens_s, default=None),
    }


def short_id(name: str) -> str:
    """The first 8 of an id's random characters. Other ids are shown whole."""
    found = _RANDOM_ID.search(name)
    return found[1] if found else name


def render(seen: dict[str, Any], name_of: Callable[[str], str] = short_id) -> RenderableType:
    """A status as tables, in which ``name_of`` an id is shown."""
    num_gateways = seen.get("num_gateways", 1)
    whose = "this gateway" if num_gateways == 1 else f"{num_gateways} gateways"
    gateway, now = seen["gateway"], time.time()
    style = "green" if gateway["status"] == "ok" else "red"
    head = Text.assemble(
        ("Warren ", "bold"),
        gateway["version"],
        "   gateway ",
        (gateway["status"].replace("_", " "), style),
        f", up {duration(now - gateway['started_at'])}, "
        f"{number_of(gateway['num_requests'], 'request')}"
        f"   {number_of(seen['num_dead_letters'], 'dead letter')}",
        _rates(seen.get("recent")),
    )
    queues = [
        queue for queue in seen["queues"] if queue["lane"] != "suspect" or queue["num_waiting"]
    ]
    return Group(
        head,
        Text(),
        FittedTable("Workers", _WORKERS, [_worker(one, now, name_of) for one in seen["workers"]]),
        FittedTable("Queues", _QUEUES, [_queue(one) for one in queues]),
        FittedTable(
            f"Streams of {whose} ({seen['num_streams']})",
            _STREAMS,
            [_stream(one, now, name_of) for one in seen["streams"]],
        ),
        FittedTable(
            f"Tenants of {whose}", _TENANTS, [_tenant(tenant) for tenant in seen["tenants"]]
        ),
        FittedTable(
            "API keys with limits",
            _KEYS,
            [_key(key) for key in seen.get("keys", ()) if key["num_running"] is not None],
        ),
    )


def _rates(recent: dict[str, Any] | None) -> str:
    """The rates of the last interval, as a line below the gateway's."""
    if recent is None:
        return ""
    answers_per_s = recent["num_first_tokens"] / _INTERVAL_S
    line = f"\n{recent['tokens_per_s']:,.0f} tokens/s, {answers_per_s:.1f} answers/s"
    if recent["first_token_s"] is None:
        return line
    return f"{line}, first token within {duration(recent['first_token_s'])} (95th percentile)"


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


def _worker(worker: dict[str, Any], now: float, name_of: Callable[[str], str]) -> Sequence[Cell]:
    uptime_s = None if worker["started_at"] is None else now - worker["started_at"]
    return (
        name_of(worker["id"]),
        worker["model"],
        Text(
            worker["state"].replace("_", " "),
            style="green" if worker["state"] == "serving" else "yellow",
        ),
        # A gateway of an earlier version does not state the engine.
        worker.get("engine") or "own",
        f"{worker['num_running']} of {worker['max_num_seqs']}",
        str(worker["num_waiting"]),
        _bar(worker["kv_usage"]),
        str(worker["num_answered"]),
        duration(uptime_s),
    )


def _queue(queue: dict[str, Any]) -> Sequence[Cell]:
    return (
        queue["model"],
        queue["lane"],
        str(queue["num_waiting"]),
        duration(queue["oldest_s"]),
        str(queue["num_consumers"]),
    )


def _stream(stream: dict[str, Any], now: float, name_of: Callable[[str], str]) -> Sequence[Cell]:
    state = stream["state"]
    if stream["num_crashes"]:
        state += f", {stream['num_crashes']} lost"
    elif stream["num_workers"] > 1:
        state += ", moved"
    return (
        name_of(stream["id"]),
        stream["tenant"] or "anonymous",
        stream["model"],
        state,
        name_of(stream["worker"] or "-"),
        str(stream["num_tokens"]),
        duration(now - stream["created_at"]),
    )


def _tenant(tenant: dict[str, Any]) -> Sequence[Cell]:
    names = ("requests", "in_flight", "failed", "cancelled", "prompt_tokens", "cached_tokens")
    # A gateway of an earlier version counts no cancelled requests.
    counts = [f"{tenant.get(f'num_{name}', 0):,}" for name in (*names, "generated_tokens")]
    return (tenant["tenant"] or "anonymous", *counts)


def _key(key: dict[str, Any]) -> Sequence[Cell]:
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
    done, left = "━─" if output.encoding.startswith("utf") else "#-"
    return Text.assemble(
        (done * full, style), (left * (_BAR_CELLS - full), "dim"), f" {share:4.0%}"
    )

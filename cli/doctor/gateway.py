"""The checks of ``warren doctor`` that concern a gateway, which may run on another machine."""

import json
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from cli.doctor.findings import Finding, failure, ok, skipped, warning
from cli.doctor.web import Fetched, fetch
from cli.gateway_client import base_url
from shared.version import UNKNOWN, VERSION

_MAX_SKEW_S = 5.0


def check_gateway(url: str, api_key: str | None) -> Iterator[Finding]:
    """Check that the gateway at ``url`` runs, takes requests and accepts the API key, and what it
    serves."""
    url = base_url(url)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        live = fetch(f"{url}/live")
        yield _live(url, live)
        if _fact(live, "status") is None:
            return
        yield _ready(fetch(f"{url}/health"))
        yield _clock(live)
        listed = fetch(f"{url}/v1/models", headers)
        yield _key(listed, has_key=api_key is not None)
        if listed.status != HTTPStatus.UNAUTHORIZED:
            yield _models(listed)
            yield _version(fetch(f"{url}/admin/v1/status", headers))
    except (OSError, ValueError) as error:
        yield failure("gateway", f"{url} does not answer: {error}", "start it, or correct --url")


_REMEDIES = {
    "broker_unavailable": "start the gateway's broker, or correct its --broker",
    "broker_blocked": "give the broker memory or disk space: see `rabbitmqctl status`",
}
"""What to do about a state of `/health`."""


def _live(url: str, live: Fetched) -> Finding:
    if _fact(live, "status") is None:
        return failure("gateway", f"{url} is not a gateway of Warren", "correct --url")
    return ok("gateway", f"{url} runs")


def _ready(health: Fetched) -> Finding:
    if health.status == HTTPStatus.OK:
        return ok("ready", "it takes requests")
    status = _fact(health, "status")
    return failure(
        "ready",
        f"it takes no requests: {status or f'/health is answered {health.status}'}",
        _REMEDIES.get(str(status), "wait for its restart"),
    )


def _clock(live: Fetched) -> Finding:
    """Deadlines are absolute times, which gateways write and workers read."""
    if "date" not in live.headers:
        return skipped("clock", "the gateway's answer has no date")
    skew_s = time.time() - parsedate_to_datetime(live.headers["date"]).timestamp()
    if abs(skew_s) > _MAX_SKEW_S:
        return failure(
            "clock",
            f"this machine's clock and the gateway's differ by {abs(skew_s):.0f} s: deadlines of "
            "jobs are absolute times",
            "synchronize both with NTP",
        )
    return ok("clock", "this machine's clock and the gateway's agree")


def _key(listed: Fetched, *, has_key: bool) -> Finding:
    if listed.status != HTTPStatus.UNAUTHORIZED:
        return ok("API key", "the gateway accepts it" if has_key else "none is needed")
    if has_key:
        return failure(
            "API key",
            "the gateway does not accept it",
            "correct --api-key-file, --api-key or OPENAI_API_KEY",
        )
    return warning(
        "API key",
        "the gateway requires one: its models and its version are not checked",
        "set OPENAI_API_KEY, or name a file that contains it with --api-key-file",
    )


def _models(listed: Fetched) -> Finding:
    if listed.status == HTTPStatus.FORBIDDEN:
        return skipped("models", "the API key lacks the scope generate")
    try:
        models = [model["id"] for model in json.loads(listed.body)["data"]]
    except (ValueError, KeyError, TypeError):
        return failure("models", f"/v1/models is answered {listed.status}", "see the gateway's log")
    if not models:
        return warning(
            "models",
            "no worker has announced itself",
            "start a worker on the same broker; a key may also be limited to other models",
        )
    return ok("models", f"served: {', '.join(models)}")


def _version(status: Fetched) -> Finding:
    """Workers of this machine and the gateway exchange messages."""
    if status.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return skipped("version", "an API key with the scope operator is needed to see it")
    theirs = (_fact(status, "gateway") or {}).get("version", UNKNOWN)
    detail = f"{theirs} at the gateway, {VERSION} on this machine"
    if theirs != VERSION and UNKNOWN not in (theirs, VERSION):
        return warning("version", detail, "install one version on all machines")
    return ok("version", detail)


def _fact(answer: Fetched, name: str) -> Any:
    """A field of the JSON object that is the answer; None if it has none."""
    try:
        return json.loads(answer.body)[name]
    except (ValueError, KeyError, TypeError):
        return None

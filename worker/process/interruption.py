"""Notices that this machine ends soon: clouds give them to spot instances in their metadata, and
operators in a file or with a signal.

Each cloud has a metadata server that only its machines reach. Sources: AWS, "Spot Instance
interruption notices" and "Use IMDSv2"; Google, "Spot VMs" (``instance/preempted``); Azure,
"Scheduled Events for Linux VMs" and "Instance Metadata Service".
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

_TIMEOUT_S = 5.0
_LIFETIME_S = "300"
"""AWS's tokens are valid for so many seconds; each look uses a new token."""
UNREADABLE = (httpx.HTTPError, OSError, ValueError)
"""What `read_notice` raises if there may be a notice that it cannot read."""
SIGNAL = "signal:"
"""The beginning of a place of notice that is a signal."""
_ENDINGS_OF_AZURE = frozenset({"Preempt", "Terminate"})


@dataclass(frozen=True, slots=True)
class MetadataServer:
    """Where a cloud gives notice."""

    url: str
    read: Callable[[httpx.AsyncClient], Awaitable[str]]
    """Returns the notice, or an empty string. Raises `httpx.HTTPError` and `ValueError`."""


async def _of_aws(client: httpx.AsyncClient) -> str:
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": _LIFETIME_S}
    token = (await client.put("/latest/api/token", headers=ttl)).raise_for_status().text
    found = await client.get(
        "/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token}
    )
    return "" if found.status_code == httpx.codes.NOT_FOUND else found.raise_for_status().text


async def _of_gcp(client: httpx.AsyncClient) -> str:
    path, headers = "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
    found = (await client.get(path, headers=headers)).raise_for_status().text.strip()
    return "preempted" if found.upper() == "TRUE" else ""


async def _of_azure(client: httpx.AsyncClient) -> str:
    path, headers = "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}
    found = (await client.get(path, headers=headers)).raise_for_status().json()
    ending = [event for event in found["Events"] if event["EventType"] in _ENDINGS_OF_AZURE]
    if not ending:
        return ""
    # The machines of a scale set or an availability set hear of one another's events.
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    name = (await client.get(path, headers=headers)).raise_for_status().text.strip()
    kinds = {event["EventType"] for event in ending if name in event["Resources"]}
    return ", ".join(sorted(kinds))


CLOUDS: Mapping[str, MetadataServer] = {
    "aws": MetadataServer("http://169.254.169.254", _of_aws),
    "gcp": MetadataServer("http://metadata.google.internal", _of_gcp),
    "azure": MetadataServer("http://169.254.169.254", _of_azure),
}
"""By their names in `WorkerSettings.interruption_notice`."""


async def read_notice(place: str, clouds: Mapping[str, MetadataServer] = CLOUDS) -> str:
    """The notice at ``place``; an empty string if there is none. A place is the name of a cloud,
    which may be followed by ``=`` and the address of its metadata server, or the path of a file,
    which gives notice as soon as it exists. A signal is no notice before it comes.

    Raises the errors of `UNREADABLE`: `ValueError` for an answer that is no metadata.
    """
    name, _, url = place.partition("=")
    if place.startswith(SIGNAL):
        return ""
    if name not in clouds:
        return place if await asyncio.to_thread(Path(place).exists) else ""
    server = replace(clouds[name], url=url) if url else clouds[name]
    async with httpx.AsyncClient(
        base_url=server.url, timeout=_TIMEOUT_S, trust_env=False
    ) as client:
        try:
            return await server.read(client)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no list of events: {error!r}") from error


async def wait_for_notice(
    place: str,
    interval_s: float,
    failed: Callable[[Exception, int], object],
    clouds: Mapping[str, MetadataServer] = CLOUDS,
) -> str:
    """The notice at ``place``, once there is one. A look that fails is repeated like any other, and
    ``failed`` is called with its error and the number of looks that have failed in a row. A signal
    is heard at once."""
    if place.startswith(SIGNAL):
        return await _received(signal.Signals[place.removeprefix(SIGNAL)])
    num_failed = 0
    while True:
        try:
            if notice := await read_notice(place, clouds):
                return notice
            num_failed = 0
        except UNREADABLE as error:
            num_failed += 1
            failed(error, num_failed)
        await asyncio.sleep(interval_s)


async def _received(signum: signal.Signals) -> str:
    """The name of a signal, once it comes. Further signals change nothing: their default action
    would end the process while it hands its jobs over."""
    received = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signum, received.set)
    await received.wait()
    return signum.name

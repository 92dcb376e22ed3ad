"""What API keys have used, as gateways and workers tell all gateways."""

from typing import Annotated

from msgspec import Meta, Struct, field

from shared.messages.fields import Count, RequestId, Tenant, UnixTime, Wire


class KeyUsage(Struct, frozen=True, array_like=True):
    """The use of one API key at one gateway."""

    seconds: dict[int, tuple[Count, Count]] = field(default_factory=dict)
    """The requests and tokens of each second of the last minute, by Unix time."""
    num_running: Count = 0
    """Requests in progress."""


class DetachedJob(Struct, frozen=True, array_like=True):
    """A detached job that counts against its tenant."""

    tenant: Tenant
    deadline: UnixTime
    """When it ends at the latest."""


class UsageReport(Wire, frozen=True, kw_only=True):
    """To all gateways: what one gateway has admitted, and is about to admit.

    The use of a key replaces what the gateway said of it before. Each gateway sends this before it
    admits a request, and counts what it has heard when its own message has come back.
    """

    gateway: Annotated[str, Meta(max_length=64)]
    number: Count
    """The number of the message among those of the gateway."""
    keys: dict[str, KeyUsage] = field(default_factory=dict)
    """By key id. Keys whose use has not changed are left out."""
    detached: dict[RequestId, DetachedJob] = field(default_factory=dict)
    """New detached jobs, by request id."""
    is_new: bool = False
    """The gateway has not heard the others: they answer with all that they have used."""


class Ended(Wire, frozen=True, kw_only=True):
    """To all gateways: a detached job has ended."""

    request_id: RequestId
    num_tokens: Count | None = None
    """The tokens of its prompts and answers, if the sender knows them."""

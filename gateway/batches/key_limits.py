"""The limits of the API key that ordered a batch: its lines wait for them."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.limits import Grant, Limits
from gateway.intake.turnstile import Turnstile
from gateway.store.batches import BatchRecord
from shared.errors import RateLimited
from shared.messages import GenerationJob

logger = logging.getLogger(__name__)


def key_of(batch: BatchRecord, keys: Keys) -> ApiKey:
    """The API key of a batch. A key that was revoked, or that this gateway has not read yet, is as
    it was when the batch was created: an accepted batch continues, within the same limits."""
    known = keys.with_id(batch.key_id)
    if known is not None and known.tenant == batch.tenant:
        return known
    limits = dict(batch.key_limits or {})
    models = tuple(limits.pop("models", ()))
    of_tenant = keys.limits_of(batch.tenant)
    return ApiKey(batch.key_id, batch.tenant, "", "", models=models, of_tenant=of_tenant, **limits)


class LineSlot:
    """The slot of a line within the limits. The line has it from its admission until it is
    answered, however often it is tried."""

    def __init__(self, lines: "LineLimits", stack: AsyncExitStack) -> None:
        self._lines = lines
        self._stack = stack
        self.grant: Grant | None = None
        """Set once the line is admitted."""

    async def take(self, num_tokens: int, job: GenerationJob | None = None) -> Grant:
        """Wait until the limits admit the line, which has about this many tokens. ``job`` is its
        generation, if the line is a generation.

        Raises `InvalidRequest` if the limits never admit the line, and `Unavailable` and
        `BusError`.
        """
        if self.grant is None:
            self.grant = await self._lines.admit(self._stack, num_tokens, job)
        return self.grant


class LineLimits:
    """Admits the lines of a batch, in the order in which they come."""

    def __init__(self, batch: BatchRecord, keys: Keys, limits: Limits) -> None:
        self._batch = batch
        self._keys = keys
        self._turnstile = Turnstile(limits)
        self._has_waited = False

    @property
    def key(self) -> ApiKey:
        """The key with its present limits."""
        return key_of(self._batch, self._keys)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[LineSlot]:
        """A slot for a line, which is returned when the context ends."""
        async with AsyncExitStack() as stack:
            yield LineSlot(self, stack)

    async def admit(
        self, stack: AsyncExitStack, num_tokens: int, job: GenerationJob | None
    ) -> Grant:
        return await self._turnstile.admit(
            stack, lambda: self.key, num_tokens, job, is_batch_line=True, report=self._report
        )

    def _report(self, error: RateLimited) -> None:
        if not self._has_waited:
            self._has_waited = True
            fields = {"batch": self._batch.id, "key": self._batch.key_id, "reason": error.message}
            logger.info("batch waits for the limits of its API key", extra=fields)

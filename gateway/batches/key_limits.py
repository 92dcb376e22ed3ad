"""The limits of the API key that ordered a batch: its lines wait for them."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.api_key import ApiKey
from gateway.intake.limits import Grant, Limits
from gateway.store.batches import BatchRecord
from shared.errors import RateLimited
from shared.messages import GenerationJob

logger = logging.getLogger(__name__)

_MAX_PAUSE_S = 0.1
"""A slot may become free at any time: answers have fewer tokens than estimated, and end."""


def key_of(batch: BatchRecord, keys: Keys) -> ApiKey:
    """The API key of a batch. One that was revoked, or that this gateway has not read yet, is as it
    was when the batch was created: what was accepted continues, within the same limits."""
    known = keys.with_id(batch.key_id)
    if known is not None and known.tenant == batch.tenant:
        return known
    limits = dict(batch.key_limits or {})
    models = tuple(limits.pop("models", ()))
    of_tenant = keys.limits_of(batch.tenant)
    return ApiKey(batch.key_id, batch.tenant, "", "", models=models, of_tenant=of_tenant, **limits)


class LineSlot:
    """The slot of one line within the limits. The line has it from its admission until it is
    answered, however often it is tried."""

    def __init__(self, lines: "LineLimits", stack: AsyncExitStack) -> None:
        self._lines = lines
        self._stack = stack
        self.grant: Grant | None = None
        """Set once the line is admitted."""

    async def take(self, num_tokens: int, job: GenerationJob | None = None) -> Grant:
        """Wait until the limits admit the line, which has about this many tokens. ``job`` is its
        generation, if it is one.

        Raises `InvalidRequest` if they never will, and `Unavailable` and `BusError`.
        """
        if self.grant is None:
            self.grant = await self._lines.admit(self._stack, num_tokens, job)
        return self.grant


class LineLimits:
    """Admits the lines of one batch, in the order in which they come: small ones do not overtake a
    large one for ever."""

    def __init__(self, batch: BatchRecord, keys: Keys, limits: Limits) -> None:
        self._batch = batch
        self._keys = keys
        self._limits = limits
        self._turn = asyncio.Lock()
        self._has_waited = False

    @property
    def key(self) -> ApiKey:
        """The key with its present limits."""
        return key_of(self._batch, self._keys)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[LineSlot]:
        """A slot for one line, which is returned when the context ends."""
        async with AsyncExitStack() as stack:
            yield LineSlot(self, stack)

    async def admit(
        self, stack: AsyncExitStack, num_tokens: int, job: GenerationJob | None
    ) -> Grant:
        async with self._turn:
            while True:
                try:
                    admission = self._limits.admit(self.key, num_tokens, job, is_batch_line=True)
                    return await stack.enter_async_context(admission)
                except RateLimited as error:
                    self._report(error)
                    pause_s = min(error.retry_after_s, _MAX_PAUSE_S)
                    await asyncio.sleep(pause_s * secrets.SystemRandom().uniform(0.5, 1.0))

    def _report(self, error: RateLimited) -> None:
        if not self._has_waited:
            self._has_waited = True
            fields = {"batch": self._batch.id, "key": self._batch.key_id, "reason": error.message}
            logger.info("batch waits for the limits of its API key", extra=fields)

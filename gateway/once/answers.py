"""The stored answers of executions that have ended: an exact cache."""

import logging
import time
from collections.abc import Sequence

from prometheus_client import Counter

from gateway.log.cursor import LogCursor, LogEvent
from gateway.once.playback import Playback
from gateway.store.files.exact_answers import ExactAnswer
from gateway.store.state import Store, StoredState
from shared.errors import Unavailable, UndecodableMessage
from shared.log import Relay
from shared.messages import Release, Started, decode_event, encode
from shared.telemetry.metrics import Catalog

logger = logging.getLogger(__name__)

_SWEEP_INTERVAL_S = 60.0


class AnswerShelf:
    """Keeps logs of answers for a time and up to a size. The cache only saves work: without the
    database, requests are computed."""

    def __init__(self, store: Store, catalog: Catalog, *, kept_s: float, max_bytes: int) -> None:
        """``kept_s``: seconds for which an answer is kept. ``max_bytes``: of all answers."""
        self._store = store
        self._kept_s = kept_s
        self._max_bytes = max_bytes
        self._failures = _counter(catalog)

    async def has(self, execution_id: str) -> bool:
        """Whether the answer of an execution is stored."""
        return await self._read(execution_id) is not None

    async def load(self, execution_id: str, playback: Playback) -> bool:
        """Add the events of a stored answer; returns whether there is one."""
        body = await self._read(execution_id)
        if body is None:
            return False
        try:
            log = decode_event(body)
        except UndecodableMessage as error:  # a later version wrote it
            self._fail("read", execution_id, error.message)
            return False
        cursor = LogCursor(Release(request_id=execution_id), None)
        cursor.begin(is_renewed=True)
        events = [action.event for action in cursor.read(log) if isinstance(action, Relay)]
        if not cursor.reader.is_ended:
            self._fail("read", execution_id, "the answer has no end")
            return False
        playback.add(events, cursor, is_complete=True)
        return True

    async def put(
        self, execution_id: str, cursor: LogCursor, events: Sequence[LogEvent], numerics: str
    ) -> None:
        """Store the answer that ``cursor`` has read, unless some of it has other numerics than
        ``numerics``."""
        started = [event for event in events if isinstance(event, Started)]
        if cursor.facts is None or any(event.numerics != numerics for event in started):
            return
        now = time.time()
        answer = ExactAnswer(
            execution_id=execution_id,
            tenant=cursor.facts.tenant,
            body=encode(cursor.restored()),
            created_at=now,
            expires_at=now + self._kept_s,
        )
        if len(answer.body) > self._max_bytes:
            return
        try:
            state = await self._store.open()
            await state.exact_answers.write(answer)
        except Unavailable as error:
            self._fail("written", execution_id, error.message)

    async def sweep(self) -> None:
        """Delete old answers again and again, and the oldest answers of too many, until
        cancelled."""

        async def sweep(state: StoredState) -> None:
            await state.exact_answers.sweep(time.time(), self._max_bytes)

        await self._store.keep_swept(sweep, _SWEEP_INTERVAL_S)

    async def _read(self, execution_id: str) -> bytes | None:
        if not self._store.is_in_use:
            return None
        try:
            state = await self._store.open()
            return await state.exact_answers.read(execution_id, time.time())
        except Unavailable as error:
            self._fail("read", execution_id, error.message)
            return None

    def _fail(self, action: str, execution_id: str, reason: str) -> None:
        self._failures.labels(action).inc()
        facts = {"request_id": execution_id, "reason": reason}
        logger.warning(f"stored answer not {action}", extra=facts)


def _counter(catalog: Catalog) -> Counter:
    return catalog.counter(
        "warren_gateway_exact_answer_failures_total",
        "Stored answers that could not be read or written, so that requests were computed.",
        "action",
        begin=("read", "written"),
    )

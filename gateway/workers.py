"""Which models there are: what workers announce, and what the broker remembers."""

import time
from dataclasses import dataclass, field

from shared import topology
from shared.bus.base import Bus
from shared.errors import ModelNotFound
from shared.messages import Announcement

_FORGET_AFTER_S = 10.0


@dataclass(slots=True)
class _Known:
    announcement: Announcement
    seen_at: float


@dataclass(slots=True)
class LiveWorkers:
    """The workers that have announced themselves of late, by address."""

    bus: Bus
    _workers: dict[str, _Known] = field(default_factory=dict)
    _first_seen_at: dict[str, int] = field(default_factory=dict)

    def hear(self, announcement: Announcement) -> None:
        if announcement.is_leaving:
            self._workers.pop(announcement.worker, None)
        else:
            self._workers[announcement.worker] = _Known(announcement, time.monotonic())
            self._first_seen_at.setdefault(announcement.model, int(time.time()))

    def models(self) -> dict[str, list[Announcement]]:
        """The last word of each live worker, by model."""
        self._forget()
        models: dict[str, list[Announcement]] = {}
        for known in self._workers.values():
            models.setdefault(known.announcement.model, []).append(known.announcement)
        return models

    def first_seen_at(self, model: str) -> int:
        """Unix time of the model's first announcement."""
        return self._first_seen_at[model]

    async def require(self, model: str) -> None:
        """Return if ``model`` has a live worker, or a queue that waits for one.

        Raises `ModelNotFound` and `BusUnavailable`.
        """
        if model in self.models():
            return
        queue = topology.jobs_queue(model, "interactive")
        if await self.bus.inspect(queue.name) is None:
            raise ModelNotFound(f"The model '{model}' does not exist.", param="model")

    def _forget(self) -> None:
        oldest = time.monotonic() - _FORGET_AFTER_S
        self._workers = {a: known for a, known in self._workers.items() if known.seen_at > oldest}

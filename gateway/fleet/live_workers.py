"""The available models and their workers, from announcements and from the queues at the broker."""

import time
from dataclasses import dataclass, field

from gateway.fleet.backlog import Backlog
from shared import topology
from shared.bus.base import Bus
from shared.errors import InvalidRequest, ModelNotFound
from shared.messages import Announcement

_FORGET_AFTER_S = 10.0
_FORGET_VOICE_AFTER_S = 120.0


@dataclass(slots=True)
class _Known:
    announcement: Announcement
    seen_at: float


@dataclass(slots=True)
class LiveWorkers:
    """Workers with a recent announcement, by address."""

    bus: Bus
    backlog: Backlog
    _workers: dict[str, _Known] = field(default_factory=dict)
    _heard_at: dict[str, float] = field(default_factory=dict)
    """Includes workers that are shutting down, whose streams continue for a while."""
    _first_seen_at: dict[str, int] = field(default_factory=dict)

    def hear(self, announcement: Announcement) -> None:
        now = time.monotonic()
        if announcement.worker not in self._heard_at:
            self._forget()
        self._heard_at[announcement.worker] = now
        if announcement.is_leaving:
            self._workers.pop(announcement.worker, None)
        else:
            self._workers[announcement.worker] = _Known(announcement, now)
            self._first_seen_at.setdefault(announcement.model, int(time.time()))
        self.backlog.hear(announcement)

    def of_model(self, model: str) -> list[Announcement]:
        """The latest announcement of each live worker of one model."""
        oldest = time.monotonic() - _FORGET_AFTER_S
        return [
            known.announcement
            for known in self._workers.values()
            if known.announcement.model == model and known.seen_at > oldest
        ]

    async def find(self, model: str) -> Announcement | None:
        """What a live worker announces of a model: workers of one name agree on it. None if the
        model's queue waits for a worker.

        Raises `ModelNotFound` and `BusUnavailable`.
        """
        if workers := self.of_model(model):
            return workers[0]
        queue = topology.jobs_queue(model, "interactive")
        if await self.bus.inspect(queue.name) is None:
            raise ModelNotFound(f"The model '{model}' does not exist.", param="model")
        return None

    def admit(self, model: str) -> None:
        """Raises `Overloaded` if the queues of all live workers of a model are too long."""
        if workers := self.of_model(model):
            self.backlog.admit(model, [worker.worker for worker in workers])

    def models(self) -> dict[str, list[Announcement]]:
        """The latest announcement of each live worker, by model."""
        self._forget()
        models: dict[str, list[Announcement]] = {}
        for known in self._workers.values():
            models.setdefault(known.announcement.model, []).append(known.announcement)
        return models

    def only_model(self) -> str:
        """The model of a request that names none. Raises `InvalidRequest` unless there is one."""
        models = list(self.models())
        if len(models) != 1:
            raise InvalidRequest("model: expected the name of a model.", param="model")
        return models[0]

    def first_seen_at(self, model: str) -> int:
        """Unix time of the model's first announcement."""
        return self._first_seen_at[model]

    def heard_at(self, worker: str) -> float:
        """Monotonic time of a worker's last heartbeat; 0 if there was none."""
        return self._heard_at.get(worker, 0.0)

    def _forget(self) -> None:
        now = time.monotonic()
        oldest = now - _FORGET_AFTER_S
        self._workers = {a: known for a, known in self._workers.items() if known.seen_at > oldest}
        if len(self._heard_at) > 2 * len(self._workers) + 16:
            oldest = now - _FORGET_VOICE_AFTER_S
            self._heard_at = {a: at for a, at in self._heard_at.items() if at > oldest}

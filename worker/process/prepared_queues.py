"""Queues that a worker's user may not declare, because an operator has declared them.

A user that is limited to some models may not bind queues to the exchanges of jobs, because the
broker cannot limit to which keys it would bind them. See ``infra/rabbitmq/worker_account.py``.
"""

from collections.abc import Awaitable, Callable

from shared.bus.base import Exchange, Queue, QueueState
from shared.bus.rabbit import RabbitBus
from shared.errors import AccessRefused


class WorkerBus(RabbitBus):
    """A worker's connections to the broker."""

    def __init__(self, url: str, *, name: str = "warren") -> None:
        """``url`` and ``name`` as for `RabbitBus`."""
        super().__init__(url, name=name)
        self._prepared: set[str] = set()
        """The queues that the user may not declare: the broker logs each attempt as an error."""

    async def declare(self, *resources: Exchange | Queue) -> None:
        for resource in resources:
            if not await declare_or_find(resource, super().declare, self.inspect):
                self._prepared.add(resource.name)

    async def declare_again(self, *resources: Exchange | Queue) -> tuple[str, ...]:
        own = [resource for resource in resources if resource.name not in self._prepared]
        for resource in resources:
            if resource not in own and await self.inspect(resource.name) is None:
                raise AccessRefused(f"queue '{resource.name}' is missing; an operator declares it")
        return await super().declare_again(*own)


async def declare_or_find(
    resource: Exchange | Queue,
    declare: Callable[[Exchange | Queue], Awaitable[None]],
    inspect: Callable[[str], Awaitable[QueueState | None]],
) -> bool:
    """Declare a resource, or find that it is a shared queue which exists. Returns whether it was
    declared.

    Raises `AccessRefused` if the user may not declare it and it is not there, or if the user may
    declare the queue but not bind it; and as `Bus.declare`.
    """
    try:
        await declare(resource)
    except AccessRefused as error:
        is_shared = isinstance(resource, Queue) and not resource.is_exclusive
        is_about_queue = f"'{resource.name}'" in error.message  # and not about an exchange
        if not is_shared or not is_about_queue or await inspect(resource.name) is None:
            raise
        return False
    return True

"""The free space of a disk. The last part is kept for work that has begun."""

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from shared.errors import Unavailable
from shared.telemetry.store_outage import StoreOutage

_MIB = 1 << 20
_MIN_FLOOR_BYTES = 256 * _MIB
_MAX_FLOOR_BYTES = 2048 * _MIB
_LOOK_INTERVAL_S = 0.2
"""A large upload looks so often while it is written."""


class FreeSpace:
    """The free space of the file system with a directory.

    Below the floor nothing new is stored there. Usage records, and the answers of requests and
    batches in progress, still have the space below it.
    """

    def __init__(
        self,
        directory: Path | None = None,
        outage: StoreOutage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a directory, as for PostgreSQL and object stores, there is always space. A lack
        is reported to ``outage``."""
        self._directory = directory
        self._outage = StoreOutage("disk") if outage is None else outage
        self._clock = clock
        self._look_at = 0.0

    async def require(self) -> None:
        """Raises `Unavailable` if the free space is below the floor."""
        await self.look()
        if not self._outage.is_up():
            raise Unavailable("The disk is nearly full: nothing new is stored until it has space.")

    async def look(self) -> None:
        """Report whether there is space, unless that was just done."""
        now = self._clock()
        if self._directory is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_INTERVAL_S
        try:
            total, _, free = await asyncio.to_thread(shutil.disk_usage, self._directory)
        except OSError:  # writing reports what is wrong with the directory
            return
        floor = _floor(total)
        if free >= floor:
            self._outage.worked()
        else:
            self._outage.failed(
                f"{free // _MIB} MiB of {total // _MIB} MiB are free, and the last "
                f"{floor // _MIB} MiB are kept for what has begun"
            )


def _floor(total: int) -> int:
    """The space that is kept: 5 % of the disk, within bounds that suit large disks and small
    disks."""
    return min(total // 4, max(_MIN_FLOOR_BYTES, min(total // 20, _MAX_FLOOR_BYTES)))

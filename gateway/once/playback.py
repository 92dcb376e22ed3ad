"""The events of a shared execution, as far as they have arrived, for any number of readers."""

import asyncio
from collections.abc import Sequence

from gateway.log.cursor import Item, LogCursor, LogEvent, Restarted
from shared.errors import WarrenError
from shared.messages import Failed


class Playback:
    """Events in order, optionally followed by an error. One task adds events. Readers keep their
    own positions, so that a slow reader takes no memory and holds nobody up."""

    def __init__(self) -> None:
        self.cursor: LogCursor | None = None
        """The reader of the log that the events come from; None before the first event."""
        self.events: list[LogEvent] = []
        self.reading = 0
        """The number of the reading. A new reading begins with the first event of the log again,
        possibly divided otherwise."""
        self.is_complete = False
        """Whether the last event of the log is there."""
        self.error: WarrenError | None = None
        self._changed: set[asyncio.Future[None]] = set()

    @property
    def has_failed(self) -> bool:
        """Whether the events end with a failure."""
        is_failure = self.is_complete and isinstance(self.events[-1], Failed)
        return is_failure or self.error is not None

    def restart(self) -> None:
        """Begin another reading, unless the current reading has no events yet."""
        if self.events:
            self.events, self.is_complete = [], False
            self.reading += 1

    def add(self, items: Sequence[Item], cursor: LogCursor, *, is_complete: bool) -> None:
        """Add what ``cursor`` has read next."""
        for item in items:
            if isinstance(item, Restarted):
                self.restart()
            else:
                self.events.append(item)
        self.cursor, self.is_complete = cursor, is_complete
        self.wake()

    def fail(self, error: WarrenError) -> None:
        """End with ``error`` after the events, unless they are complete."""
        if not self.is_complete:
            self.error = self.error or error
        self.wake()

    async def wait_changed(self, until: float) -> None:
        """Return at the next change, at the latest at ``until``, in the event loop's time. A reader
        that was cancelled or woken leaves nothing behind."""
        loop = asyncio.get_running_loop()
        changed: asyncio.Future[None] = loop.create_future()
        self._changed.add(changed)
        alarm = loop.call_at(until, _resolve, changed)
        try:
            await changed
        finally:
            alarm.cancel()
            self._changed.discard(changed)

    def wake(self) -> None:
        """Make all readers look again."""
        for changed in self._changed:
            _resolve(changed)


class PlaybackPlace:
    """How far a reader of a playback has come."""

    def __init__(self, playback: Playback) -> None:
        self._playback = playback
        self._reading = playback.reading
        self._num_taken = 0
        self._has_given = False

    @property
    def is_at_end(self) -> bool:
        """Whether the last event of the log has been taken."""
        playback = self._playback
        is_current = self._reading == playback.reading
        return playback.is_complete and is_current and self._num_taken == len(playback.events)

    def take(self) -> list[Item]:
        """The next items, in order; none if there are none yet."""
        playback = self._playback
        if playback.cursor is None or not playback.events:
            return []
        items: list[Item] = []
        if self._reading != playback.reading:
            self._reading, self._num_taken = playback.reading, 0
            items = [Restarted()] if self._has_given else []
        items += playback.events[self._num_taken :]
        self._num_taken = len(playback.events)
        self._has_given |= bool(items)
        return items


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)

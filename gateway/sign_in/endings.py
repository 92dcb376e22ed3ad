"""Sessions of browsers that end before their time: of a person who signs out, or because an
operator ends the sessions of a person or of everyone.

A session is a cookie that any gateway accepts, so the database lists the ended sessions, and each
gateway reads the list again whenever another gateway has changed it. Only requests that end
sessions wait for the database.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Mapping

from msgspec import Struct

from gateway.sign_in.access import LONGEST_SESSION_HOURS, Person
from gateway.store.state import Store
from gateway.store.tenants.revisions import LOOK_INTERVAL_S, TableVersion
from shared.errors import Unavailable

EVERYONE = "everyone"
"""The subject of all sessions."""
_VALID_S = 3600.0
"""Seconds for which sessions stay valid while the database cannot be read: an ending may be missed
for so long, but requests that need no database go on."""
_LONGEST_S = LONGEST_SESSION_HOURS * 3600


class Session(Struct, frozen=True):
    """A person at a browser."""

    id: str
    person: Person
    began_at: float
    """Unix time in seconds."""

    @property
    def subject(self) -> str:
        """The subject of this session alone."""
        return f"session {self.id}"

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects whose endings concern this session."""
        person = self.person
        return EVERYONE, self.subject, person_named(person.id), person_named(person.name)


def person_named(name: str) -> str:
    """The subject of all sessions of a person, by the person's name or id. It is a hash, so that
    the database has no names."""
    digest = hashlib.sha256(name.casefold().encode(errors="surrogatepass"))
    return f"person {digest.hexdigest()}"


class SessionEndings:
    """Knows which sessions have ended."""

    def __init__(self, store: Store, *, look_interval_s: float = LOOK_INTERVAL_S) -> None:
        self._store = store
        self._look_interval_s = look_interval_s
        self._version: TableVersion | None = None
        self._ended: Mapping[str, float] = {}
        self._unwritten: dict[str, float] = {}
        """The sessions that have ended here and that are not in the database yet."""
        self._known_until = -math.inf if store.is_in_use else math.inf
        """The time of `time.monotonic` until which the sessions that were read are up to date."""
        self._reading = asyncio.Lock()

    def has_ended(self, session: Session) -> bool:
        """Whether a session has ended. Raises `Unavailable` while nobody can know."""
        if time.monotonic() > self._known_until:
            raise Unavailable("Sessions cannot be checked now, because the database is away.")
        return any(
            session.began_at <= ended.get(subject, -math.inf)
            for subject in session.subjects
            for ended in (self._ended, self._unwritten)
        )

    async def end(self, subject: str) -> None:
        """End the sessions of a subject that have begun, at this gateway at once and at the others
        within seconds. Raises `Unavailable` if the other gateways cannot be told yet."""
        self._unwritten[subject] = time.time()
        await self.refresh()

    async def read_first(self) -> None:
        """Read what has ended before the first request comes, if the database answers."""
        await self._store.read_first(self.refresh, "ended sessions")

    async def run(self) -> None:
        """Read again whenever something has ended; never returns."""
        await self._store.keep_read(self.refresh, self._look_interval_s)

    async def refresh(self) -> None:
        """Write the sessions that have ended here, and read the sessions that have ended elsewhere.
        Raises `Unavailable`."""
        async with self._reading:
            stored = (await self._store.open()).sessions
            for subject, ended_at in list(self._unwritten.items()):
                await stored.end(subject, ended_at)
            version = await stored.version()
            if version != self._version:
                self._ended = await stored.all()
                self._version = version
            for subject, ended_at in list(self._unwritten.items()):
                if self._ended.get(subject, -math.inf) >= ended_at:
                    del self._unwritten[subject]
            self._known_until = time.monotonic() + _VALID_S
            oldest = time.time() - _LONGEST_S
            if any(ended_at < oldest for ended_at in self._ended.values()):
                await stored.forget(oldest)

"""The jobs that a consumer holds, and the order in which they begin.

The broker delivers jobs in the order of their arrival. A worker takes more of them than it can run
and begins them in an order of its own, in which no tenant's jobs wait behind all jobs of another
tenant, and the jobs of a tenant begin by their deadlines (`worker.jobs.line`). A job that has not
begun has left no trace in its log, so it can be returned to its queue unnoticed.

A tenant that sends more jobs than the window has room for does not fill it, or the jobs of others
would wait at the broker behind its own. Once it holds as many places as are free, its further jobs
are set aside, in a queue from which a few are taken at a time. This is the dynamic threshold of
shared-memory switches (Choudhury and Hahne, 1998): a place is free for the next tenant, however
many there are, and a tenant that is alone has half of them.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from itertools import chain

from shared.messages import GenerationJob, seconds_left
from worker.jobs.line import WaitingLine
from worker.jobs.pace import JobPace

_NUM_AHEAD = 2
"""Jobs of each tenant that begin before the engine has room for them, if there are several tenants.
The engine serves tenants by their tokens (`worker.engine.shares`), so it must have a sequence of
each of them to choose from."""
_MAX_AHEAD = 32
"""The same for all tenants together."""
_MIN_LOOK_S = 0.01
"""How soon after a look a job looks again whether it can still be in time."""
_SLOTS_PER_AHEAD = 8
"""One batch job begins ahead for so many slots, even if there is one tenant: each slot would
otherwise be empty while a job is settled and the next job begins. More jobs would wait here while
other workers are free."""


class Turn(Enum):
    """What a held job is to do next."""

    BEGIN = auto()
    GIVE_BACK = auto()
    """Return to the queue, for another worker."""
    SET_ASIDE = auto()
    """Move to the queue of jobs that were set aside."""
    LOST = auto()
    """Nothing: its delivery was lost with its channel."""


class Place:
    """The place of a job in a window, from its delivery until it is settled."""

    def __init__(
        self, window: "JobWindow", job: GenerationJob, *, is_fresh: bool, was_set_aside: bool
    ) -> None:
        self.tenant = job.tenant
        self.is_fresh = is_fresh
        self.was_set_aside = was_set_aside
        self.begin_by: float | None = None
        """When the job must begin to end before its deadline, on the clock of the event loop."""
        self._window = window
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._turn: asyncio.Future[Turn] = self._loop.create_future()
        self._alarm: asyncio.TimerHandle | None = None
        left_s = seconds_left(job)
        if left_s is not None:
            self.begin_by = self._loop.time() + left_s - window.pace.expected_s(job)

    @property
    def is_decided(self) -> bool:
        return self._turn.done()

    async def turn(self) -> Turn:
        """Wait for the job's turn. A job that cannot end before its deadline any more begins, in
        order to fail."""
        self._look()
        try:
            return await self._turn
        finally:
            if self._alarm is not None:
                self._alarm.cancel()

    def _look(self) -> None:
        """Begin the job if it is hopeless, and look again when it may be."""
        if self.is_decided or self._job.deadline is None:
            return
        slack_s = self._job.deadline - time.time() - self._window.pace.least_s(self._job)
        if slack_s <= 0:
            self._window.begin(self)
        else:
            self._alarm = self._loop.call_later(max(slack_s, _MIN_LOOK_S), self._look)

    def decide(self, turn: Turn) -> None:
        if not self.is_decided:  # its task may have been cancelled
            self._turn.set_result(turn)

    def progress(self) -> None:
        """Record that the job has received a token."""
        self._window.progress(self)


class JobWindow:
    """Begins the jobs of a class, ``max_begun`` at once.

    The next job is the first in the line of the tenant that has begun the fewest jobs for its
    weight. When ``max_begun`` jobs have begun and there are several tenants, each tenant may begin
    two more jobs, and another whenever one of the two has received its first token. In a window
    that ``fills_slots`` a single tenant may, too.
    """

    def __init__(
        self,
        max_begun: int,
        weights: Mapping[str, float],
        max_waiting: int = 0,
        *,
        fills_slots: bool = False,
        pace: JobPace | None = None,
    ) -> None:
        """``weights`` has the tenants whose weight is not 1. ``max_waiting``: how many jobs are to
        wait here; no job is set aside if it is 0. ``fills_slots``: whether no slot of the engine is
        to be empty between two jobs of one tenant. ``pace`` says how long jobs take; by default
        nothing is known about that."""
        self._yields = False
        self.max_begun = max_begun
        self.max_waiting = max_waiting
        self.pace = JobPace() if pace is None else pace
        self._weights = weights
        self._fills_slots = fills_slots
        self._waiting: dict[str, WaitingLine[Place]] = {}
        """The waiting jobs of each tenant. A tenant without any is left out."""
        self._begun: set[Place] = set()
        self._ahead: set[Place] = set()
        """The jobs that began beyond ``max_begun``, until their first token."""
        self._num_begun: Counter[str] = Counter()
        """The number of each tenant's jobs in ``_begun``."""
        self._num_ahead: Counter[str] = Counter()
        """The number of each tenant's jobs in ``_ahead``."""
        self._is_closed = False

    @property
    def yields(self) -> bool:
        """Whether other workers have free slots, so that no job begins that cannot run here."""
        return self._yields

    @yields.setter
    def yields(self, yields: bool) -> None:
        self._yields = yields
        self._begin_next()

    @property
    def num_waiting(self) -> int:
        """The number of jobs that have not begun."""
        return sum(map(len, self._waiting.values()))

    @property
    def is_full(self) -> bool:
        """Whether all the jobs have begun that may begin at once."""
        return len(self._begun) >= self.max_begun

    @contextmanager
    def place(
        self,
        job: GenerationJob,
        *,
        is_fresh: bool,
        at_once: bool,
        was_set_aside: bool = False,
        may_wait: bool = True,
    ) -> Iterator[Place]:
        """Hold a job. ``is_fresh``: it was never returned to its queue. ``at_once``: it does not
        wait for its turn. ``was_set_aside``: it comes from the queue of jobs that were set aside.
        ``may_wait``: otherwise it is given back unless it can begin now."""
        place = Place(self, job, is_fresh=is_fresh, was_set_aside=was_set_aside)
        if at_once:
            self.begin(place)
        elif self._is_closed or (self.is_full and not may_wait):
            place.decide(Turn.GIVE_BACK)
        elif is_fresh and not was_set_aside and self._is_crowded_by(job.tenant):
            place.decide(Turn.SET_ASIDE)
        else:
            self._waiting.setdefault(place.tenant, WaitingLine()).add(place, place.begin_by)
            self._begin_next()
        try:
            yield place
        finally:
            self._remove(place)

    def begin(self, place: Place) -> None:
        """Begin a job, whether or not it is its turn."""
        if place.is_decided:
            return
        if self.is_full:
            self._ahead.add(place)
            self._num_ahead[place.tenant] += 1
        self._begun.add(place)
        self._num_begun[place.tenant] += 1
        self._decide(place, Turn.BEGIN)

    def progress(self, place: Place) -> None:
        """Record that a begun job has received a token."""
        if place in self._ahead:
            self._ahead.remove(place)
            _discount(self._num_ahead, place.tenant)
            self._begin_next()

    def give_back(self, max_jobs: int) -> int:
        """Give back the oldest jobs that have neither begun nor been returned before; returns how
        many."""
        fresh = (place for place in chain(*self._waiting.values()) if place.is_fresh)
        given = [place for place, _ in zip(fresh, range(max_jobs), strict=False)]
        for place in given:
            self._decide(place, Turn.GIVE_BACK)
        return len(given)

    def close(self) -> None:
        """Give back all jobs that have not begun, and all jobs that arrive until `open`."""
        self._is_closed = True
        self._decide_all(Turn.GIVE_BACK)

    def open(self) -> None:
        self._is_closed = False

    def lose(self, *, were_set_aside: bool = False) -> None:
        """Forget the jobs of a queue that have not begun: their deliveries were lost."""
        for place in list(chain(*self._waiting.values())):
            if place.was_set_aside == were_set_aside:
                self._decide(place, Turn.LOST)

    def _is_crowded_by(self, tenant: str) -> bool:
        """Whether a tenant has no more room, or jobs of it were set aside and come first."""
        if not self.max_waiting:
            return False
        own = self._waiting.get(tenant, WaitingLine())
        num_free = self.max_waiting - self.num_waiting
        return len(own) >= max(1, num_free) or any(place.was_set_aside for place in own)

    def _begin_next(self) -> None:
        while (place := self._next()) is not None:
            self.begin(place)

    def _next(self) -> Place | None:
        tenants = list(self._waiting)
        if self.is_full:
            tenants = [tenant for tenant in tenants if self._may_begin_ahead(tenant)]
        if not tenants:
            return None
        tenant = min(tenants, key=lambda t: self._num_begun[t] / self._weights.get(t, 1.0))
        return self._waiting[tenant].first(asyncio.get_running_loop().time())

    def _may_begin_ahead(self, tenant: str) -> bool:
        if self.yields or len(self._ahead) >= _MAX_AHEAD:
            return False
        max_ahead = 0
        if len(self._num_begun.keys() | self._waiting.keys()) > 1:
            max_ahead = _NUM_AHEAD
        elif self._fills_slots:
            max_ahead = max(_NUM_AHEAD, min(self.max_begun // _SLOTS_PER_AHEAD, _MAX_AHEAD // 2))
        return self._num_ahead[tenant] < max_ahead

    def _decide_all(self, turn: Turn) -> None:
        for place in list(chain(*self._waiting.values())):
            self._decide(place, turn)

    def _decide(self, place: Place, turn: Turn) -> None:
        self._forget(place)
        place.decide(turn)

    def _forget(self, place: Place) -> None:
        """Remove a job from the waiting jobs, if it waits."""
        line = self._waiting.get(place.tenant)
        if line is not None:
            line.remove(place)
            if not line:
                del self._waiting[place.tenant]

    def _remove(self, place: Place) -> None:
        self._forget(place)
        if place in self._begun:
            self._begun.remove(place)
            _discount(self._num_begun, place.tenant)
        if place in self._ahead:
            self._ahead.remove(place)
            _discount(self._num_ahead, place.tenant)
        self._begin_next()


def _discount(counts: Counter[str], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]

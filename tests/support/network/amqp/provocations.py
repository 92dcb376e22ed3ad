"""Policies for an `AmqpProxy` that decide when a fault strikes."""

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from pamqp.commands import Basic

from tests.support.network.amqp.faults import (
    CANCEL,
    FAULTS,
    INTERNAL_ERROR,
    NACK,
    NOT_FOUND,
    RETURN,
    Fault,
    is_ack,
    late,
)
from tests.support.network.amqp.frames import Frame
from tests.support.network.amqp.proxy import Conversation, Deal

_HARMLESS_TO_LOSE = ("warren.workers", "warren.control", "warren.usage")
"""Exchanges whose messages may be unroutable, because they are sent again."""
_LATE_S = 7.0
"""Longer than Warren waits for a confirmation."""


def _is_ack_of_command(conversation: Conversation, frame: Frame) -> bool:
    publish = conversation.published(frame)
    return publish is not None and publish.method.exchange in _HARMLESS_TO_LOSE


def _is_delivery(conversation: Conversation, frame: Frame) -> bool:
    return frame.name == Basic.Deliver.name


CONNECTION_ENDS = (
    "320 closes connection",
    "connection cut inside of a frame",
    "connection reset inside of a frame",
    "frame with a wrong end",
    "frame of an unknown kind",
    "unknown method",
)
SURVIVED: Mapping[str, tuple[Fault, float]] = {
    "return": (replace(RETURN, fits=_is_ack_of_command), 10),
    "nack": (replace(NACK, fits=_is_ack_of_command), 10),
    "ack twice": (FAULTS["ack twice"], 1),
    "ack lost": (FAULTS["ack lost"], 0.5),
    "ack too late": (late(Conversation.pass_on, _LATE_S), 0.5),
    "403 closes channel": (replace(FAULTS["403 closes channel"], fits=is_ack), 1),
    "404 closes channel": (replace(NOT_FOUND, fits=is_ack), 1),
    "406 closes channel": (replace(FAULTS["406 closes channel"], fits=_is_delivery), 1),
    "541 closes channel": (INTERNAL_ERROR, 1),
    "consumer cancelled": (CANCEL, 1),
    **{name: (FAULTS[name], 0.05) for name in CONNECTION_ENDS},
    "frame on an unknown channel": (FAULTS["frame on an unknown channel"], 1),
    "return of an unknown message": (FAULTS["return of an unknown message"], 1),
}
"""Faults that a broker may cause at any time without a false statement about a queue, with their
frequencies. A stream survives all of them. (The answer that a queue does not exist ends a stream,
as it should.)"""


WORKERS_RATE, GATEWAYS_RATE = 1 / 40, 1 / 400
"""Of the broker's frames, something is done to so many of a worker's and of a gateway's, who gets
three for each token."""
_SPACING_S = 0.1
"""Seconds between faults. A fault returns all jobs of a queue; the more there are, the more frames
follow, so that on a fast machine no job would ever be settled between two faults."""


class Nth:
    """Strikes once, at the frame with index ``number`` among those that qualify."""

    def __init__(self, fault: Fault, number: int) -> None:
        self._fault = fault
        self._number = number
        self.num_fitted = 0
        """The number of frames that qualified."""
        self.struck = ""
        """The frame that was hit."""

    def __call__(self, conversation: Conversation, frame: Frame) -> Deal | None:
        if not self._fault.fits(conversation, frame):
            return None
        self.num_fitted += 1
        if self.num_fitted != self._number + 1:
            return None
        self.struck = f"frame {self._number}, {frame.name or 'content'} on {frame.channel}"
        return self._fault.strike


class NthOfEach:
    """Strikes each conversation once, at its frame with index ``number`` among those that
    qualify."""

    def __init__(self, fault: Fault, number: int) -> None:
        self._of = defaultdict[Conversation, Nth](partial(Nth, fault, number))

    def __call__(self, conversation: Conversation, frame: Frame) -> Deal | None:
        return self._of[conversation](conversation, frame)


class Gate:
    """Strikes as `Nth` does, but passes the result to the client only when the test asks for
    it."""

    def __init__(self, fault: Fault, number: int = 0) -> None:
        self._nth = Nth(fault, number)
        self._held: Conversation | None = None
        self._struck = asyncio.Event()

    def __call__(self, conversation: Conversation, frame: Frame) -> Deal | None:
        strike = self._nth(conversation, frame)
        if strike is not None:
            conversation.hold()
            self._held = conversation
            self._struck.set()
        return strike

    @property
    def num_fitted(self) -> int:
        return self._nth.num_fitted

    @property
    def has_struck(self) -> bool:
        return self._held is not None

    async def wait_struck(self) -> None:
        await self._struck.wait()

    def open(self) -> None:
        """Pass on what was held back."""
        assert self._held is not None
        self._held.release()


class Provocations:
    """Strikes with random faults of `SURVIVED`, drawn from ``seed``, at the share ``rate`` of the
    broker's frames, but never in quick succession. The rate may change at any time."""

    def __init__(self, seed: int, rate: float) -> None:
        self.rate = rate
        self.num_of: Counter[str] = Counter()
        """How often each fault has struck."""
        self._dice = random.Random(seed)
        self._struck_at = -math.inf
        self._refused: set[str] = set()

    def refuse_next(self, routing_key: str) -> None:
        """Nack the next message that is published with this routing key."""
        self._refused.add(routing_key)

    def __call__(self, conversation: Conversation, frame: Frame) -> Deal | None:
        if self._is_to_be_refused(conversation, frame):
            return NACK.strike
        if not conversation.is_open or self._dice.random() >= self.rate:
            return None
        now = asyncio.get_running_loop().time()
        if now - self._struck_at < _SPACING_S:
            return None
        fitting = {
            name: (fault, share)
            for name, (fault, share) in SURVIVED.items()
            if fault.fits(conversation, frame)
        }
        if not fitting:
            return None
        shares = [share for _, share in fitting.values()]
        (name,) = self._dice.choices(list(fitting), shares)
        self.num_of[name] += 1
        self._struck_at = now
        return fitting[name][0].strike

    def _is_to_be_refused(self, conversation: Conversation, frame: Frame) -> bool:
        publish = conversation.published(frame) if self._refused else None
        if publish is None or publish.method.routing_key not in self._refused:
            return False
        self._refused.remove(publish.method.routing_key)
        return True

"""Attacks on a gateway in a process of its own, and what they may cost."""

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from typing import TypeAlias

import httpx

from shared.settings import GatewaySettings
from tests.support.deployment.processes import WarrenProcess
from tests.support.gateway.lone_gateway import lone_gateway, peak_memory_bytes

MAX_BYTES_PER_BODY_BYTE = 3
"""A body as bytes, as text and as objects. Values count for themselves, with 64 bytes each."""
MAX_GROWTH_BYTES = MAX_BYTES_PER_BODY_BYTE * GatewaySettings().max_bytes_in_flight
MAX_ANSWER_S = 0.25
"""On a machine that counts to two millions in `_COUNTING_S`; slower machines have more time."""
_COUNTING_S = 0.2
_MAX_ATTACKS = 3
_PAUSE_S = 0.01

Attack: TypeAlias = Callable[[str], Awaitable[None]]
"""Attacks the gateway at a URL."""


class Victim:
    """A gateway in a process of its own, which is attacked in several ways in turn."""

    def __init__(self, process: WarrenProcess) -> None:
        self._process = process
        self._idle_bytes = peak_memory_bytes(process)

    async def assert_attack_costs_little(self, attack: Attack, name: str = "") -> None:
        """All attacks until now have made the gateway grow by no more than the bodies take that it
        handles at once, and during this attack it answers `/live` within 0.25 s all the time.

        On a busy machine other processes delay answers. The gateway's waiting time for a processor
        does not count, and one of three attacks of the same kind has to pass without a delay.
        """
        longest_s = await _longest_answers_s(self._process, attack)

        assert min(longest_s) < _max_answer_s(), (name, longest_s)
        assert peak_memory_bytes(self._process) - self._idle_bytes < MAX_GROWTH_BYTES, name


@cache
def _max_answer_s() -> float:
    began, count = time.thread_time(), 0
    while count < 2_000_000:
        count += 1
    return MAX_ANSWER_S * max(1.0, (time.thread_time() - began) / _COUNTING_S)


@contextmanager
def running_victim(log: Path) -> Iterator[Victim]:
    with lone_gateway(log) as process:
        yield Victim(process)


async def _longest_answers_s(process: WarrenProcess, attack: Attack) -> list[float]:
    """The longest that an answer took during each of the attacks, which end with the first that
    delays none."""
    longest_s: list[float] = []
    while not longest_s or (min(longest_s) >= _max_answer_s() and len(longest_s) < _MAX_ATTACKS):
        with _polled(process) as answers_s:
            await attack(process.url)
        longest_s.append(max(answers_s))
    return longest_s


@contextmanager
def _polled(process: WarrenProcess) -> Iterator[list[float]]:
    """Ask for `/live` again and again, each time on a new connection. The list has the seconds that
    each answer took, or those that the process computed meanwhile if they are fewer. It is complete
    after the block."""
    place, process_clock = httpx.URL(process.url), ~process.pid << 3 | 2  # clock_getcpuclockid(3)
    answers_s: list[float] = []
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.wait(_PAUSE_S) or not answers_s:
            began, computed = time.monotonic(), time.clock_gettime(process_clock)
            connection = HTTPConnection(place.host, place.port)
            connection.request("GET", "/live")
            assert connection.getresponse().status == 200
            connection.close()
            computed_s = time.clock_gettime(process_clock) - computed
            answers_s.append(min(time.monotonic() - began, computed_s))

    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll)
        try:
            yield answers_s
        finally:
            is_over.set()
            polling.result()

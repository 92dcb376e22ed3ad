"""The modules that a streamed chat request enters.

The requests go through a real gateway, RabbitMQ and a real worker with a synthetic model.

Concurrent tasks interleave differently each time, so several requests are traced. A module is
listed if most requests enter it, and in the most frequent order. The bus is entered whenever a
message is sent or received, so its modules are listed in alphabetical order.
"""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from dis import opmap
from importlib import import_module
from inspect import CO_NEWLOCALS
from pathlib import Path
from statistics import median_low
from types import CodeType, FrameType
from typing import Literal, TypeAlias

from bench.echo_worker import MODEL
from shared.bus.rabbit import RabbitBus
from shared.telemetry import incidents
from tests.support.gateway.http import hears_a_worker, live_gateway, text_of
from tests.support.workers.synthetic import echo_worker
from worker.process.watchdog import Watchdog

PAGE = Path(__file__).parents[3] / "docs" / "life-of-a-request.md"

Part: TypeAlias = Literal["gateway", "worker", "bus"]
Entries: TypeAlias = Counter[tuple[Part, str]]
"""How often each module was entered, in the order of first entry."""

_PARTS: tuple[Part, ...] = ("gateway", "worker", "bus")
_PRODUCT = ("gateway.", "worker.", "shared.")
_BUS = "shared.bus."
_LEFT_OUT = ("worker.engine.", Watchdog.__module__)
"""The engine, and a timer that runs on the worker's event loop once a second."""
_SYNTHETIC = "worker.model."
_SIDES: Mapping[str, Part] = {"gateway": "gateway", "worker": "worker", "engine": "worker"}
"""By the first part of the thread's name. Other threads work in the background."""
_RESUME = bytes((opmap["RESUME"], 0))
"""The instruction at which a function starts. With another argument, it resumes a coroutine."""
_LIST = re.compile(r"(<!-- modules: (?P<part>\w+) -->\n).*?(<!-- /modules -->)", re.DOTALL)

_NUM_REQUESTS = 7
_NUM_TOKENS = 3
_STEP_S = 0.03
_END_S = 0.3
"""How long to trace after the last byte, while both sides clean up."""
_ANNOUNCE_INTERVAL_S = 1.0
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Stop:
    """A module on the way."""

    module: str
    num_entries: int
    """How often it was entered while no function of it was active."""

    @property
    def summary(self) -> str:
        """The first paragraph of the module's docstring."""
        docstring = import_module(self.module).__doc__
        assert docstring is not None
        return " ".join(docstring.strip().partition("\n\n")[0].split())


Journey: TypeAlias = Mapping[Part, Sequence[Stop]]


def traced(url: str) -> Journey:
    """Send requests through the broker at ``url`` and trace them."""
    tracer = _Tracer()
    threading.setprofile(tracer)  # of the threads that start from here on
    try:
        requests = asyncio.run(_travel(url, tracer))
    finally:
        threading.setprofile(None)
    return {part: _agreed(part, requests) for part in _PARTS}


def rendered(page: str, journey: Journey) -> str:
    """The text of a page with the lists of the journey."""

    def table(match: re.Match[str]) -> str:
        (part,) = (part for part in _PARTS if part == match["part"])
        rows = [
            f"| {number} | `{stop.module}` | {stop.summary.replace('|', '&#124;')} |\n"
            for number, stop in enumerate(journey[part], 1)
        ]
        return f"{match[1]}| | Module | Purpose |\n|---|---|---|\n{''.join(rows)}{match[3]}"

    return _LIST.sub(table, page)


class _Tracer:
    """A profile function that counts the entries of modules while ``entries`` is set."""

    def __init__(self) -> None:
        self.entries: Entries | None = None
        self._is_background = ContextVar("is_background", default=False)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        entries = self.entries  # read once: it is set by another thread
        side = _SIDES.get(threading.current_thread().name.partition("_")[0])
        if side is None or frame.f_code is incidents.keep_running.__code__:
            self._is_background.set(True)  # also for the tasks and callbacks that start here
        elif entries is not None and (stop := self._stop(frame, side)) is not None:
            entries[stop] += 1

    def _stop(self, frame: FrameType, side: Part) -> tuple[Part, str] | None:
        """The module that this call enters, if it belongs to a request and was not active."""
        module = _module_of(frame)
        if not module.startswith(_PRODUCT) or not _is_start(frame):
            return None
        callers = [_module_of(caller) for caller in _callers(frame)]
        stack = (module, *callers)
        if module in callers or module.startswith(_LEFT_OUT) or _is_inside(stack, _SYNTHETIC):
            return None
        if _is_inside(stack, _BUS):  # what the bus calls back may serve anybody
            return ("bus", module) if module.startswith(_BUS) else None
        return None if self._is_background.get() else (side, module)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """The callers of a frame, up to the start of its task or thread."""
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


def _is_inside(modules: Sequence[str], package: str) -> bool:
    return any(module.startswith(package) for module in modules)


def _is_start(frame: FrameType) -> bool:
    """Whether a function starts, as opposed to a module, a class or a resumed coroutine."""
    code: CodeType = frame.f_code
    is_function = bool(code.co_flags & CO_NEWLOCALS)
    return is_function and code.co_code[frame.f_lasti : frame.f_lasti + 2] == _RESUME


async def _travel(url: str, tracer: _Tracer) -> list[Entries]:
    """The entries of each request. Each side has a thread of its own, by which the modules of
    `shared` are attributed to it."""
    stop, is_ready = threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    with (
        ThreadPoolExecutor(1, thread_name_prefix="worker") as one,
        ThreadPoolExecutor(1, thread_name_prefix="gateway") as other,
    ):
        working = loop.run_in_executor(one, asyncio.run, _work(url, is_ready, stop))
        try:
            await asyncio.to_thread(is_ready.wait, _START_TIMEOUT_S)
            return await loop.run_in_executor(other, asyncio.run, _request(url, tracer))
        finally:
            stop.set()
            await working


async def _work(url: str, is_ready: threading.Event, stop: threading.Event) -> None:
    _name_threads("worker")
    async with (
        RabbitBus(url) as bus,
        echo_worker(bus, step_s=_STEP_S, announce_interval_s=_ANNOUNCE_INTERVAL_S),
    ):
        is_ready.set()
        await asyncio.to_thread(stop.wait)


async def _request(url: str, tracer: _Tracer) -> list[Entries]:
    _name_threads("gateway")
    requests: list[Entries] = []
    async with RabbitBus(url) as bus, live_gateway(bus) as gateway:
        for _ in range(1 + _NUM_REQUESTS):
            await hears_a_worker(gateway)
            requests.append(Counter())
            tracer.entries = requests[-1]
            response = await gateway.chat(model=MODEL, stream=True, max_tokens=_NUM_TOKENS)
            await asyncio.sleep(_END_S)
            tracer.entries = None
            text_of(response.text)
    return requests[1:]  # the first request opens channels that later ones reuse


def _name_threads(side: Part) -> None:
    """Give the threads of ``asyncio.to_thread`` the side's name."""
    executor = ThreadPoolExecutor(thread_name_prefix=side)
    asyncio.get_running_loop().set_default_executor(executor)


def _agreed(part: Part, requests: Sequence[Entries]) -> list[Stop]:
    """The modules that most requests enter, in their most frequent order."""
    orders = [[module for place, module in entries if place == part] for entries in requests]
    frequency = Counter(module for order in orders for module in order)
    common = {module for module, num in frequency.items() if num > len(requests) / 2}
    if part == "bus":
        order = sorted(common)
    else:
        kept = Counter(tuple(m for m in order if m in common) for order in orders)
        order = list(kept.most_common(1)[0][0])
    return [Stop(m, median_low(entries[part, m] for entries in requests)) for m in order]


def show(journey: Journey) -> None:
    for part, stops in journey.items():
        again = [stop for stop in stops if stop.num_entries > 1]
        print(f"{part}: {len(stops)} modules, {len(again)} of them entered again")
        for number, stop in enumerate(stops, 1):
            print(f"{number:4} {stop.num_entries:4} x  {stop.module}")

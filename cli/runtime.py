"""The runtime of a command: optional dependencies, the broker, the event loop and signals."""

import asyncio
import gc
import getpass
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from shared.errors import StartupError
from shared.settings import CommonSettings

if TYPE_CHECKING:
    from shared.bus.base import Bus
    from shared.bus.rabbit import RabbitBus

INTERRUPTED = 130
_GC_THRESHOLDS = (10_000, 10, 1_000_000)
"""Python itself would look at all objects whenever their number has grown by a quarter. A gateway
that opens thousands of streams would stand still for seconds, again and again, and the broker miss
its heartbeats."""
_GC_INTERVAL_S = 10.0
_GC_SHARE = 0.01
"""The largest share of the CPU time in which all objects are looked at. By the clock that takes ten
times as long on a busy machine, and garbage would have ten times as long to grow."""

_Result = TypeVar("_Result")


def bus_of(common: CommonSettings) -> "Bus":
    if common.broker is not None:
        return broker_of(common)
    from shared.bus.memory import MemoryBus

    return MemoryBus()


def broker_of(common: CommonSettings, kind: "type[RabbitBus] | None" = None) -> "Bus":
    """The connections to the broker, of another kind than usual if ``kind`` is given."""
    if common.broker is None:
        raise StartupError(
            "no broker: set WARREN_BROKER, or name a file with its URL with --broker file:PATH"
        )
    from shared.bus.rabbit import RabbitBus

    try:
        return (kind or RabbitBus)(common.broker.get_secret_value())
    except StartupError as error:
        raise StartupError(f"--broker or WARREN_BROKER: {error}") from None


def configure(common: CommonSettings, service: str) -> None:
    from shared.telemetry import setup

    setup.configure(common, service)


@contextmanager
def needs(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise StartupError(
            f"{error.name} is not installed: run pip install '.[{extra}]' in the checkout of Warren"
        ) from error


def user_name() -> str:
    """The name of the user who runs the command, or the user's id if it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # as in a container that runs as a bare id
        return str(os.getuid())


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def on_signals(stop: Callable[[], object]) -> None:
    """Call ``stop`` on the first SIGINT or SIGTERM; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop_once() -> None:
        for signum in signals:
            loop.remove_signal_handler(signum)
            signal.signal(signum, signal.SIG_DFL)
        stop()

    for signum in signals:
        loop.add_signal_handler(signum, stop_once)


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run the coroutine of a service. All objects that exist are frozen, so that the garbage
    collector skips them."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            return runner.run(_collecting_garbage(main))
    except asyncio.CancelledError:  # a signal arrived before there was anything to drain
        # A thread that loads a model cannot be stopped, and the interpreter's own end aborts in it.
        sys.stdout.flush()
        logging.shutdown()
        os._exit(INTERRUPTED)


def exclude_from_collections() -> None:
    """Collect garbage, and let later collections pass over everything that exists now.

    To be called once something large has been imported or created that stays, such as a model: a
    collection looks at all other objects, and no thread runs in the meantime.
    """
    gc.collect()
    gc.freeze()


async def _collecting_garbage(main: Coroutine[Any, Any, _Result]) -> _Result:
    async def collect() -> None:
        exclude_from_collections()  # a service imports most of its modules when it begins
        took_s = 0.0
        while True:
            await asyncio.sleep(max(_GC_INTERVAL_S, took_s / _GC_SHARE))
            began_at = time.thread_time()
            gc.collect()
            took_s = time.thread_time() - began_at

    collecting = asyncio.create_task(collect())
    try:
        return await main
    finally:
        collecting.cancel()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()

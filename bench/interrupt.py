"""Ends the servers with the benchmark, however it is stopped."""

import functools
import signal
from collections.abc import Callable
from typing import ParamSpec

_Parameters = ParamSpec("_Parameters")


def ends_on_sigterm(main: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Make SIGTERM behave like Ctrl-C: it ends ``main`` through its context managers."""

    @functools.wraps(main)
    def wrapped(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        # A shell starts background jobs with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        main(*args, **kwargs)

    return wrapped

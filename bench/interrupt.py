"""Servers die with the bench, whichever way it is told to end."""

import functools
import signal
from collections.abc import Callable
from typing import ParamSpec

_Parameters = ParamSpec("_Parameters")


def ends_on_sigterm(main: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """SIGTERM does what Ctrl-C does: it ends ``main`` through its context managers."""

    @functools.wraps(main)
    def wrapped(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        # A shell's background jobs begin with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        main(*args, **kwargs)

    return wrapped

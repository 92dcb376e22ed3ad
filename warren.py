"""Warren in a program, and the entry point of ``warren`` and of ``python warren.py``.

`LLM` runs a model in this process. `Client` submits jobs to RabbitMQ, whose answers workers
generate. Both are imported when they are first used, with `SamplingParams` and the other names of
``__all__``, so that the command line does not wait for them.
"""

import gc
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.client.client import AsyncClient
    from shared.client.plain import Client
    from shared.errors import WarrenError
    from shared.messages import Completed, Constraint, Failed, SamplingParams
    from worker.offline import LLM

__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "Completed",
    "Constraint",
    "Failed",
    "SamplingParams",
    "WarrenError",
]

_HOMES = {
    "LLM": "worker.offline",
    "AsyncClient": "shared.client.client",
    "Client": "shared.client.plain",
    "Completed": "shared.messages",
    "Constraint": "shared.messages",
    "Failed": "shared.messages",
    "SamplingParams": "shared.messages",
    "WarrenError": "shared.errors",
}
_PACKAGES = ("cli", "gateway", "kernels", "shared", "worker")


def main() -> None:
    """Run the command line."""
    if problem := _shadow():
        sys.exit(f"error: {problem}")
    from cli.standard_streams import prepare

    prepare()
    # Objects of modules stay, and to look at them again and again would take a tenth of the time.
    gc.disable()
    from cli.main import main as run

    gc.enable()
    run()


def __getattr__(name: str) -> object:
    """Import a name of ``__all__``."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if problem := _shadow():
        raise ImportError(problem)
    value: object = getattr(import_module(_inside(_HOMES[name])), name)
    globals()[name] = value
    return value


def _is_wheel() -> bool:
    """Whether this is the package that a wheel installs, which contains all others."""
    return "__path__" in globals()


def _inside(module: str) -> str:
    return f"{__name__}.{module}" if _is_wheel() else module


def _shadow() -> str | None:
    """Names a package that Python finds in place of one of the checkout's, if there is one."""
    if _is_wheel():
        return None
    checkout = Path(__file__).resolve().parent
    for name in _PACKAGES:
        spec = find_spec(name)
        if spec is None:
            continue
        place = (
            spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin
        )
        if place is not None and Path(place).resolve().parent != checkout:
            return (
                f"{place} hides Warren's package {name!r}. Uninstall it or rename it, or "
                "install Warren without --editable: all its packages are then parts of 'warren'"
            )
    return None


if __name__ == "__main__":
    main()

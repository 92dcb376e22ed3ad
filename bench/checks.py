"""What must hold before figures are reported: the systems of ours compute the right thing."""

from collections.abc import Iterable, Sequence

from bench.comparison import run_loop
from bench.load import Request, complete, random_requests
from bench.servers import running
from bench.systems import System, warren_serve

_NUM_PROMPTS = 4
_MAX_TOKENS = 48


class WrongOutput(Exception):
    """Figures of a system that computes something else are worth nothing."""


def check_output(systems: Iterable[System], options: Sequence[str] | None) -> None:
    """Raise `WrongOutput` if one of ``systems`` is ours and our output is not what it should be.

    ``options`` are our workers', as they are in the measurement.
    """
    if not all(system.is_peer for system in systems):
        _check_greedy_text(options or ())


def _check_greedy_text(options: Sequence[str]) -> None:
    """Greedy text in float32 must be the reference provider's, to the last character."""
    requests = random_requests(_NUM_PROMPTS, seed=0, max_tokens=_MAX_TOKENS)
    expected = _texts(requests, [*options, "--kernels=reference"])
    got = _texts(requests, options)
    wrong = [k for k in range(_NUM_PROMPTS) if got[k] != expected[k]]
    if wrong:
        first = wrong[0]
        raise WrongOutput(
            f"{len(wrong)} of {_NUM_PROMPTS} prompts are answered otherwise than by the reference: "
            f"{got[first]!r} instead of {expected[first]!r}"
        )


def _texts(requests: Sequence[Request], options: Sequence[str]) -> list[str]:
    with running(warren_serve("float32", options)) as server:
        return [run_loop(complete(server.url, request)).text for request in requests]

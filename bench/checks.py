"""What must hold before figures are reported: the systems of ours compute the right thing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.agreement import Agreement
from bench.comparison import run_loop
from bench.load import MODEL, Request, complete, random_requests
from bench.quality import fixed_text, qualities
from bench.servers import running
from bench.systems import System, warren_serve
from cli.terminal import notices
from worker.checkpoints import store

_NUM_PROMPTS = 4
_MAX_TOKENS = 48
_TEXT_TOKENS = 256


class WrongOutput(Exception):
    """Figures of a system that computes something else are worth nothing."""


@dataclass(frozen=True)
class Bound:
    """What a format may do to the predictions of float32."""

    kl_mean: float
    top1: float

    def holds(self, found: Agreement) -> bool:
        return found.kl_mean <= self.kl_mean and found.top1 >= self.top1


BOUNDS: Mapping[str, Bound] = {
    "float16": Bound(1e-3, 0.98),
    "bfloat16": Bound(1e-3, 0.98),
    "q8_0": Bound(1e-2, 0.95),
    "q4_0": Bound(0.1, 0.8),
    "q4_1": Bound(1e-3, 0.98),
}


def check_output(systems: Iterable[System], options: Sequence[str] | None) -> None:
    """Raise `WrongOutput` if one of ``systems`` is ours and our output is not what it should be.

    ``options`` are our workers', as they are in the measurement.
    """
    formats = {system.weights for system in systems if not system.is_peer}
    if formats:
        _check_greedy_text(options or ())
        directory = store.resolve(MODEL)
        text = fixed_text(directory)[:_TEXT_TOKENS]
        check_agreement(directory, text, sorted(formats - {"float32"}))


def check_agreement(directory: Path, token_ids: Sequence[int], formats: Sequence[str]) -> None:
    """Each of ``formats`` must predict a text, read as it stands, nearly as float32 does.

    Prints how near. Raises `WrongOutput`.
    """
    for row in qualities(directory, token_ids, formats)[1:]:
        found, bound = row.agreement, BOUNDS[row.weights]
        text = (
            f"{row.weights} against float32 on {len(token_ids)} tokens: "
            f"KL {found.kl_mean:.1e} (at most {bound.kl_mean:.0e}), "
            f"same best token {found.top1:.1%} (at least {bound.top1:.0%})"
        )
        if not bound.holds(found):
            raise WrongOutput(text)
        notices.print(text)


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

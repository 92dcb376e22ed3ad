"""Checks before any measurement: our systems must compute correct output."""

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
from shared.messages import SamplingParams
from worker.checkpoints import store
from worker.engine.engine import Engine
from worker.engine.interface import SequenceId, StepOutput, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.loading import load_runner
from worker.model.start import RunnerLimits

_NUM_PROMPTS = 4
_MAX_TOKENS = 48
_TEXT_TOKENS = 256
_FINITE_TOKENS = 8


class WrongOutput(Exception):
    """A system of ours computes something wrong, so that its figures would be meaningless."""


@dataclass(frozen=True)
class Bound:
    """How far the predictions of a format may differ from float32's."""

    kl_mean: float
    top1: float

    def holds(self, found: Agreement) -> bool:
        return found.kl_mean <= self.kl_mean and found.top1 >= self.top1


BOUNDS: Mapping[str, Bound] = {
    "float16": Bound(1e-3, 0.98),
    "bfloat16": Bound(1e-3, 0.98),
    "q8_0": Bound(2e-2, 0.92),
    "q4_0": Bound(0.1, 0.8),
    "q4_1": Bound(1e-2, 0.92),
    "q8_0+int16": Bound(1e-2, 0.95),
    "q4_0+int16": Bound(0.1, 0.8),
    "q4_1+int16": Bound(1e-3, 0.98),
}
"""Activations of quantized weights have 8 bits, whose rounding comes on top, or 16."""


def check_output(systems: Iterable[System], options: Sequence[str] | None) -> None:
    """Check the output of our systems among ``systems``. ``options`` are the worker options that
    are also used for the measurement. Raises `WrongOutput`."""
    formats = {
        system.weights for system in systems if not system.is_peer and not system.has_foreign_engine
    }
    if formats:
        _check_greedy_text(options or ())
        directory = store.resolve(MODEL)
        text = fixed_text(directory)[:_TEXT_TOKENS]
        exact = {f"{name}+int16" for name in formats} & BOUNDS.keys()
        check_agreement(directory, text, sorted(formats - {"float32"} | exact))


def check_finite(gguf: Path) -> None:
    """Check that our engine computes finite logits with the random weights of a file. Raises
    `WrongOutput`."""
    [request] = random_requests(1, seed=0, max_tokens=_FINITE_TOKENS)
    prompt_len = len(request.prompt_ids)
    limits = RunnerLimits(
        max_num_seqs=1,
        max_num_batched_tokens=prompt_len,
        max_seq_len=prompt_len + request.max_tokens,
    )
    runner = load_runner(store.resolve(str(gguf)), limits, device="cpu")
    engine = Engine(runner, SchedulerLimits(1, prompt_len))
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    sequence = SequenceId("finite", 0)
    submit = Submit(sequence, request.prompt_ids, greedy, 0, request.max_tokens)
    outputs = list(engine.step([submit]))
    while engine.has_work:
        outputs += engine.step()
    engine.close()
    if not all(isinstance(output, StepOutput) for output in outputs):
        raise WrongOutput(f"logits of {gguf.name} are not finite")


def check_agreement(directory: Path, token_ids: Sequence[int], formats: Sequence[str]) -> None:
    """Check that each of ``formats`` predicts a text nearly as well as float32, and print the
    difference. Raises `WrongOutput`."""
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
    """Check that greedy text in float32 equals that of the reference provider. Raises
    `WrongOutput`."""
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

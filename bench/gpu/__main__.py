"""Measures kernels and steps against their floors, and the engine against peers; see
bench/README.md.

    python -m bench.gpu [--shape NAME] [--device DEVICE] [--only SECTION]... [--out DIRECTORY]

Each section takes less than ten minutes. Peers run in processes of their own, before ours takes the
device's memory. Each figure is printed and written as soon as it is measured. A failure becomes a
row of the table and makes the exit code 1.
"""

import argparse
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from bench.gpu import ceilings, kernels, model, parity, peers, report, requests, steps, where, whole
from bench.gpu.figures import Ceilings, Figure, device_ms, failure, release
from bench.gpu.scale import SCALES, Scale, with_requests
from kernels.providers import Ops, Provider, load_ops
from kernels.triton.compilations import compilations
from worker.model.runner import TorchRunner

RESULTS = Path(__file__).parents[1] / "results"
SECTIONS = ("peers", "kernels", "engine", "awq")
_PEER_TIMEOUT_S = 210.0
_AWQ_GOAL = 2.78
_USED_GOAL = 0.96
_NUM_PROFILED = 5


@dataclass
class GpuBench:
    """All measurements of a scale on a device, and the figures so far."""

    scale: Scale
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    ceilings: Ceilings
    save: Callable[[list[Figure]], None]
    """Called with all figures whenever there is a new figure."""
    logs: Path
    """The directory for the output of the peers."""
    peer_timeout_s: float = _PEER_TIMEOUT_S
    figures: list[Figure] = field(default_factory=list)
    outcomes: list[peers.PeerOutcome] = field(default_factory=list)
    decode_ms: dict[int, float] = field(default_factory=dict)

    def run(self, section: str) -> None:
        """Run a section; an error becomes its figure."""
        work: dict[str, Callable[[], Iterable[Figure]]] = {
            "kernels": self._kernels,
            "peers": self._peers,
            "engine": self._engine,
            "awq": self._awq,
        }
        began = time.perf_counter()
        try:
            for figure in work[section]():
                self._add(figure)
        except Exception as error:  # noqa: BLE001 (the other sections are worth something)
            traceback.print_exc()
            self._add(failure(section, "section", error))
        release(self.device)
        print(f"# {section}: {time.perf_counter() - began:.0f} s", flush=True)

    def _add(self, figure: Figure) -> None:
        self.figures.append(figure)
        print(report.table([figure]).splitlines()[1], flush=True)
        # Save now, so that a run that is stopped early keeps its figures.
        self.save(self.figures)

    def _kernels(self) -> Iterator[Figure]:
        reference = load_ops("reference")
        yield from parity.measure(self.scale, self.ops, reference, self.device, self.dtype)
        yield from kernels.measure(
            self.scale, self.ops, reference, self.ceilings, self.device, self.dtype
        )

    def _peers(self) -> Iterator[Figure]:
        asked = requests.mixed(self.scale)
        for outcome in peers.run_all(
            self.scale, asked, self.device, self.dtype, self.peer_timeout_s, self.logs
        ):
            self.outcomes.append(outcome)
            if outcome.run is None:
                yield Figure(
                    section="peers",
                    name=outcome.peer.name,
                    value=None,
                    unit="tok/s",
                    note=outcome.reason,
                )
            else:
                rate = outcome.run.outputs_per_s
                yield Figure(section="peers", name=outcome.peer.name, value=rate, unit="tok/s")
        with self._runner() as runner:
            run = whole.run(self.scale, runner, asked)
            yield from self._whole(run)
        yield from self._beside(run)

    def _engine(self) -> Iterator[Figure]:
        with self._runner() as runner, compilations() as compiled:
            yield from self._steps(runner)
            yield from self._whole(whole.run(self.scale, runner, requests.mixed(self.scale)))
            yield Figure(
                section="engine",
                name="kernels compiled after the start",
                value=len(compiled),
                unit="",
                ratio=float(not compiled),
                goal=1.0,
                note=", ".join(sorted(set(compiled)))[:120],
            )
            # Last, because not every machine allows profiling.
            yield from self._where(runner)

    @contextmanager
    def _runner(self, *, is_awq: bool = False) -> Iterator[TorchRunner]:
        decoder = model.decoder(self.scale, self.ops, self.device, self.dtype, is_awq=is_awq)
        runner = model.runner(self.scale, decoder, self.ops)
        try:
            yield runner
        finally:
            runner.close()

    def _steps(self, runner: TorchRunner) -> Iterator[Figure]:
        stepped = steps.Steps(self.scale, runner, self.device)
        for figure, size in zip(
            steps.decodes(self.scale, stepped, self.ceilings, self.dtype),
            self.scale.batches,
            strict=True,
        ):
            if figure.value is not None:
                self.decode_ms[size] = figure.value
            yield figure
        for size in (self.scale.batches[0], self.scale.batches[-1]):
            yield steps.drawn(stepped, size)
        longest = min(self.scale.max_num_batched_tokens, runner.max_seq_len)
        yield from steps.prefills(self.scale, stepped, self.ceilings, (longest // 4, longest))

    def _where(self, runner: TorchRunner) -> Iterator[Figure]:
        stepped = steps.Steps(self.scale, runner, self.device)
        for size in (self.scale.batches[0], self.scale.batches[-1]):
            yield from where.measure(
                lambda size=size: stepped.decode(size, _NUM_PROFILED),  # type: ignore[misc]
                _NUM_PROFILED,
                self.device,
                name=f"{size} x 1",
            )

    def _whole(self, run: whole.WholeRun) -> Iterator[Figure]:
        yield Figure(
            section="engine",
            name=f"{self.scale.num_requests} requests, {run.num_outputs} tokens out",
            value=run.outputs_per_s,
            unit="tok/s",
            note=f"{run.seconds:.1f} s, {run.num_steps} steps, {run.num_preemptions} preemptions",
        )
        yield Figure(
            section="engine",
            name="slots of the KV blocks that are used",
            value=100 * (1 - run.unused_slots),
            unit="%",
            ratio=1 - run.unused_slots,
            goal=_USED_GOAL,
            note="of all steps",
        )

    def _beside(self, run: whole.WholeRun) -> Iterator[Figure]:
        for outcome in self.outcomes:
            if outcome.run is not None:
                yield Figure(
                    section="peers",
                    name=f"beside {outcome.peer.name}",
                    value=outcome.run.outputs_per_s,
                    unit="tok/s",
                    ratio=run.outputs_per_s / outcome.run.outputs_per_s,
                    goal=outcome.peer.goal,
                    note="ours over theirs",
                )

    def _awq(self) -> Iterator[Figure]:
        yield from self._awq_layers()
        dense = self.decode_ms
        if not dense:
            with self._runner() as runner:
                stepped = steps.Steps(self.scale, runner, self.device)
                dense = {size: stepped.decode_ms(size) for size in self.scale.batches}
            del runner, stepped
            release(self.device)
        with self._runner(is_awq=True) as runner:
            stepped = steps.Steps(self.scale, runner, self.device)
            for size in self.scale.batches:
                taken_ms, dense_ms = stepped.decode_ms(size), dense.get(size)
                yield Figure(
                    section="awq",
                    name=f"decode step, {size} x 1",
                    value=taken_ms,
                    unit="ms",
                    ratio=None if dense_ms is None else dense_ms / taken_ms,
                    note="times as fast as unpacked",
                )

    @torch.inference_mode()
    def _awq_layers(self) -> Iterator[Figure]:
        """The products of several layers, whose weights exceed every cache."""
        for size in self.scale.batches:
            packed_ms = self._layers_ms(size, is_awq=True)
            dense_ms = self._layers_ms(size, is_awq=False)
            yield Figure(
                section="awq",
                name=f"linears of {model.NUM_LAYERS} layers, {size} tokens",
                value=packed_ms,
                unit="ms",
                ratio=dense_ms / packed_ms,
                goal=_AWQ_GOAL if size == 1 else None,
                note="times as fast as unpacked",
            )

    def _layers_ms(self, num_tokens: int, *, is_awq: bool) -> float:
        work = model.linears(
            self.scale, self.ops, self.device, self.dtype, num_tokens, is_awq=is_awq
        )
        return device_ms(work, self.device, repeat=2)


def _provider(device: torch.device) -> Provider:
    """The Triton ops; without a GPU only if the interpreter was requested."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return "triton"
    return "reference"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if something failed. A missed goal is not a failure."""
    options = _options().parse_args(arguments)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    scale = with_requests(SCALES[options.shape], options.num_requests)
    about = report.describe(device, options.shape, dtype)
    found = ceilings.measure(scale, device, dtype)
    ops = load_ops(_provider(device), is_batch_invariant=options.batch_invariant)
    name = "-".join(["gpu", *options.only])
    save = partial(report.write, options.out / f"{name}.json", about)
    bench = GpuBench(
        scale, device, dtype, ops, found, save, options.out, peer_timeout_s=options.peer_timeout_s
    )
    bench.figures += ceilings.figures(found)
    release(device)
    for section in SECTIONS:
        if not options.only or section in options.only:
            bench.run(section)
    print(report.table(bench.figures))
    points = [
        (size, taken, found.floor_ms(model.step_bytes(scale, dtype, size)))
        for size, taken in bench.decode_ms.items()
    ]
    if points and not report.draw(options.out / f"{name}.svg", points):
        print("# no picture: matplotlib is not installed")
    return int(any(figure.is_failure for figure in bench.figures))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--shape", choices=tuple(SCALES), default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, default=[], help="Repeatable; names the files."
    )
    parser.add_argument("--num-requests", type=int, help="For engine and peers.")
    parser.add_argument("--batch-invariant", action="store_true", help="As the setting.")
    parser.add_argument("--peer-timeout-s", type=float, default=_PEER_TIMEOUT_S)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

"""What a step of the engine costs on the CPU, where its time goes, and what limits it.

    python -m bench.engine [--model NAME] [--format FORMAT]... [--threads N] [--quick]

Decode steps against batch size and context, and prompts, each computed alone by the decoder, with
the time of each part of it; then the rates of these parts beside the machine's peak rates, and the
linears beside torch's; then the whole engine, whose steps take longer by what planning, laying out
and sampling cost, once for each way to draw. The fastest of several repetitions counts: others were
disturbed.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench import ceilings
from bench import engine_report as report
from bench.dense_shape import DenseShape
from bench.engine_report import EngineTime, FormatMeasurements, StepTime
from bench.machine import describe
from bench.options import RESULTS, Out
from bench.quality import load
from bench.report import write_json
from kernels.providers import load_ops
from shared.messages import Constraint, SamplingParams
from worker.checkpoints import store
from worker.decode.constraints import Constraints, Grammar
from worker.engine.engine import Engine
from worker.engine.interface import ScheduledBatch, ScheduledSequence, SequenceId, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.config import read_json_config
from worker.model.inputs import build_inputs
from worker.model.runner import TorchRunner
from worker.model.start import whole_cache
from worker.text import Tokenizer

FORMATS = ("float32", "bfloat16", "q8_0", "q4_1")
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (192, 1024, 4096)
PROMPTS = ((128, 0), (512, 0), (512, 3584))
"""Tokens of a chunk, and tokens before it."""
PRODUCTS = (8, 32, 128, 512)
"""Tokens of the steps whose linears are compared with torch's: decodes and prompts of above."""
_BLOCK_SIZE = 16
_NUM_BLOCKS = 64 * 192 // _BLOCK_SIZE + 4096
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_PEOPLE = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "role": {"enum": ["author", "editor", "reader"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "role", "age"],
        "additionalProperties": False,
    },
}
"""An endless list, longer than any measurement."""
DRAWS = {
    "greedy": _GREEDY,
    "temperature": SamplingParams(temperature=0.8, ignore_eos=True),
    "min-p": SamplingParams(temperature=0.8, min_p=0.1, ignore_eos=True),
    "top-p, top-k": SamplingParams(temperature=0.8, top_p=0.9, top_k=50, ignore_eos=True),
    "300 biases": SamplingParams(
        temperature=0.0, logit_bias=dict.fromkeys(range(300), 1.0), ignore_eos=True
    ),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.5, ignore_eos=True
    ),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5, ignore_eos=True),
    "JSON schema": SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        constraint=Constraint(kind="json_schema", source=json.dumps(_PEOPLE)),
    ),
}
_DRAWS_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The measurements to make, and for how long."""

    batches: Sequence[int] = BATCHES
    contexts: Sequence[int] = CONTEXTS
    prompts: Sequence[tuple[int, int]] = PROMPTS
    products: Sequence[int] = PRODUCTS
    engine_batches: Sequence[int] = (1, 8, 32)
    draws: Sequence[str] = tuple(DRAWS)
    num_steps: int = 64
    """Steps of the engine."""
    seconds: float = 1.0
    """For each measurement of a step, a product and a peak rate."""


QUICK = EnginePlan(
    batches=(1,),
    contexts=CONTEXTS[:1],
    prompts=((16, 0),),
    products=(1, 16),
    engine_batches=(1,),
    draws=(),
    num_steps=2,
    seconds=0.01,
)
"""Shows only that everything can be measured."""


class EngineBench:
    """A decoder with weights of one format, and a cache with random keys and values."""

    def __init__(
        self, directory: Path, weights: str, num_threads: int, *, seconds: float = 1.0
    ) -> None:
        torch.set_num_threads(num_threads)
        decoder = load(directory, weights, "native")
        torch.set_num_threads(1)  # as a worker does
        if not decoder.traits.has_own_threads:
            raise typer.BadParameter("the native kernels do not compute this model")
        self._weights = weights
        self._seconds = seconds
        self._decoder = decoder
        self._constraints = Constraints(Tokenizer.load(directory))
        self._cache = whole_cache(decoder, _BLOCK_SIZE, _NUM_BLOCKS)
        for values in self._cache.tensors:
            values.view(-1)[: 1 << 16].normal_()

    @property
    def kv_dtype(self) -> torch.dtype:
        return self._decoder.dtype

    def decodes(self, num_seqs: int, context: int) -> StepTime:
        return self._step(num_seqs, 1, context)

    def prompt(self, num_tokens: int, context: int) -> StepTime:
        return self._step(1, num_tokens, context)

    def engine(self, num_seqs: int, draws: str = "greedy", num_steps: int = 64) -> EngineTime:
        """An engine with decoding sequences of 128 tokens."""
        runner = TorchRunner(
            self._decoder,
            self._cache,
            load_ops("native"),
            max_seq_len=512,
            max_num_batched_tokens=num_seqs * 128,
        )
        engine = Engine(runner, SchedulerLimits(num_seqs, num_seqs * 128))
        sampling = DRAWS[draws]
        grammar = self._grammar(sampling)
        engine.step([self._submit(i, num_steps + 8, sampling, grammar) for i in range(num_seqs)])
        for _ in range(4):
            engine.step()
        self._decoder.profile()
        began = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        step_s = (time.perf_counter() - began) / num_steps
        decoder_s = sum(self._decoder.profile().values()) / num_steps
        engine.close()
        return EngineTime(
            weights=self._weights,
            draws=draws,
            num_seqs=num_seqs,
            step_ms=step_s * 1e3,
            decoder_ms=decoder_s * 1e3,
        )

    def _grammar(self, sampling: SamplingParams) -> Grammar | None:
        if sampling.constraint is None:
            return None
        return asyncio.run(self._constraints.compile(sampling.constraint))

    def _submit(
        self, name: int, max_tokens: int, sampling: SamplingParams, grammar: Grammar | None
    ) -> Submit:
        prompt = torch.randint(0, self._decoder.vocab_size, (128,)).tolist()
        matcher = None if grammar is None else grammar.matcher((), None)
        return Submit(SequenceId(str(name), 0), prompt, sampling, 0, max_tokens, constraint=matcher)

    @torch.inference_mode()
    def _step(self, num_seqs: int, num_tokens: int, context: int) -> StepTime:
        batch = ScheduledBatch(list(self._shares(num_seqs, num_tokens, context)))
        inputs = build_inputs(batch, _BLOCK_SIZE, self._decoder.device).forward
        self._decoder.forward(inputs, self._cache)
        best_s = float("inf")
        best_parts: dict[str, float] = {}
        until = time.perf_counter() + self._seconds
        while time.perf_counter() < until or not best_parts:
            self._decoder.profile()
            began = time.perf_counter()
            self._decoder.forward(inputs, self._cache)
            taken = time.perf_counter() - began
            parts = self._decoder.profile()
            if taken < best_s:
                best_s, best_parts = taken, parts
        return StepTime(
            weights=self._weights,
            num_seqs=num_seqs,
            num_new_tokens=num_tokens,
            context=context,
            step_ms=best_s * 1e3,
            parts={name: seconds * 1e3 for name, seconds in best_parts.items()},
        )

    def _shares(self, num_seqs: int, num_tokens: int, context: int) -> Iterator[ScheduledSequence]:
        num_blocks = -(-(context + num_tokens) // _BLOCK_SIZE)
        for i in range(num_seqs):
            # Blocks are far apart, as they are after hours of operation.
            blocks = [(i + num_seqs * k * 37) % _NUM_BLOCKS for k in range(num_blocks)]
            yield ScheduledSequence(
                sequence_id=SequenceId(str(i), 0),
                start=context,
                token_ids=torch.randint(0, self._decoder.vocab_size, (num_tokens,)).tolist(),
                block_tables=[blocks],
                is_sampled=True,
                sampling=_GREEDY,
                seed=0,
                position=0,
                previous_row=None,
            )


def measure(
    directory: Path, weights: str, num_threads: int, plan: EnginePlan
) -> FormatMeasurements:
    bench = EngineBench(directory, weights, num_threads, seconds=plan.seconds)
    first, *longer = plan.contexts
    steps = [bench.decodes(num_seqs, first) for num_seqs in plan.batches]
    steps += [bench.decodes(num_seqs, context) for context in longer for num_seqs in (1, 8)]
    steps += [bench.prompt(*prompt) for prompt in plan.prompts]
    engine = [bench.engine(size, num_steps=plan.num_steps) for size in plan.engine_batches]
    engine += [bench.engine(_DRAWS_BATCH, draws, plan.num_steps) for draws in plan.draws]
    return FormatMeasurements(weights=weights, kv_dtype=bench.kv_dtype, steps=steps, engine=engine)


def main(
    model: Annotated[str, typer.Option(help="As `warren worker` takes it.")] = "smollm2",
    formats: Annotated[
        list[str], typer.Option("--format", help="Weight formats. Repeatable.")
    ] = list(FORMATS),  # noqa: B006 (typer copies it)
    threads: Annotated[int, typer.Option(help="That compute.")] = torch.get_num_threads(),
    quick: Annotated[bool, typer.Option(help="Only show that everything can be measured.")] = False,
    out: Out = RESULTS,
) -> None:
    directory, plan = store.resolve(model), QUICK if quick else EnginePlan()
    config = DenseShape.of(read_json_config(directory))
    peak = ceilings.peak_rates(threads, plan.seconds)
    products = [
        ceilings.torch_products(config, num_tokens, threads, plan.seconds)
        for num_tokens in plan.products
    ]
    measured = [measure(directory, weights, threads, plan) for weights in formats]
    steps = [step for found in measured for step in found.steps]
    engine = [row for found in measured for row in found.engine]
    report.show_steps(steps)
    report.show_rates(config, measured, peak)
    report.show_products(measured, products)
    report.show_engine(engine)
    content = {
        **describe([]),
        "model": store.served_name(model),
        "threads": threads,
        "peak": dataclasses.asdict(peak),
        "torch_linears": [dataclasses.asdict(product) for product in products],
        "steps": [dataclasses.asdict(step) for step in steps],
        "engine": [dataclasses.asdict(row) for row in engine],
    }
    write_json(out / "engine.json", content)
    report.draw(out / "engine.svg", steps)


if __name__ == "__main__":
    typer.run(main)

"""What drafts save: the same answers with and without them, in turns, by the engine alone.

    python -m bench.speculation [--model NAME] [--format FORMAT] [--runs N]

One user edits a text, one user asks for JSON, first in words and then with a schema, one user
chats, and 32 users send prompts of random tokens. Answers are greedy, except in the last row, and
must be the same with and without drafts.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import typer
from rich.table import Table

from bench.machine import describe
from bench.options import RESULTS, Out, Runs
from bench.report import console, write_json
from shared.messages import ChatMessage, ChatPrompt, Constraint, SamplingParams
from worker.checkpoints import store
from worker.decode.constraints import Constraints, Grammar
from worker.engine.engine import Engine
from worker.engine.interface import EngineLoad, SequenceId, StepOutput, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.model.loading import load_runner
from worker.model.runner import TorchRunner
from worker.model.start import RunnerLimits, can_check_drafts
from worker.text import Tokenizer

_TEXT = Path(__file__).parent / "texts" / "alice.txt"
_MAX_NUM_SEQS = 32
_MAX_BATCHED_TOKENS = 4096
_MAX_DRAFT_TOKENS = 15
_RECORDS = [
    {"name": name, "city": city, "age": age}
    for name, city, age in (
        ("Ann Miller", "Lisbon", 34),
        ("Bob Stone", "Oslo", 41),
        ("Carla Diaz", "Madrid", 29),
        ("Dev Patel", "London", 38),
    )
]

_SCHEMA = {
    "type": "array",
    "minItems": len(_RECORDS),
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "city": {"type": "string"},
            "age": {"type": "integer"},
        },
        "required": ["name", "city", "age"],
        "additionalProperties": False,
    },
}

SequenceTokens: TypeAlias = dict[SequenceId, list[int]]


@dataclass(frozen=True)
class Workload:
    """Answers that are generated at the same time."""

    name: str
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    sampling: SamplingParams
    grammar: Grammar | None = None

    def submits(self, run: int) -> list[Submit]:
        return [
            Submit(
                SequenceId(f"{run}-{k}", 0),
                prompt,
                self.sampling,
                k,
                self.max_tokens,
                constraint=None if self.grammar is None else self.grammar.matcher((), None),
            )
            for k, prompt in enumerate(self.prompts)
        ]


@dataclass(frozen=True)
class WorkloadRow:
    """A workload, without and with drafts."""

    workload: str
    num_users: int
    plain_tokens_per_s: float
    """Tokens per second of decoding: the time until the first token is not part of it."""
    drafted_tokens_per_s: float
    num_tokens: int
    num_drafted: int
    num_accepted: int

    @property
    def speedup(self) -> float:
        return self.drafted_tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True)
class Answers:
    tokens: SequenceTokens
    seconds: float
    load: EngineLoad

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


def workloads(tokenizer: Tokenizer, num_tokens: int) -> list[Workload]:
    """Answers of ``num_tokens`` tokens each, if the model does not end them."""
    text = _TEXT.read_text(encoding="utf-8")[:1600]
    records = "\n".join(", ".join(map(str, record.values())) for record in _RECORDS)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)

    def asked(question: str) -> list[int]:
        return tokenizer.encode(ChatPrompt(messages=(ChatMessage(role="user", content=question),)))

    generator = torch.Generator().manual_seed(0)
    random = [
        torch.randint(100, 40_000, (128,), generator=generator).tolist()
        for _ in range(_MAX_NUM_SEQS)
    ]
    edit = f"Repeat this text, and write Alicia instead of Alice:\n\n{text}"
    example = '[{"name": "Eve Moss", "city": "Rome", "age": 50}'
    as_json = f"Write these people as JSON, such as {example}, ...]:\n\n{records}\n"
    drawn = SamplingParams(temperature=0.8, ignore_eos=True)
    schema = Constraint(kind="json_schema", source=json.dumps(_SCHEMA))
    grammar = asyncio.run(Constraints(tokenizer).compile(schema))
    return [
        Workload("edit", [asked(edit)], num_tokens, greedy),
        Workload("json", [asked(as_json)], num_tokens, greedy),
        Workload("json, schema", [asked(as_json)], num_tokens, greedy, grammar),
        Workload("chat", [asked("Why is the sky blue?")], num_tokens, greedy),
        Workload("random, drawn", random, num_tokens, drawn),
    ]


def answered(runner: TorchRunner, workload: Workload, max_draft_tokens: int, run: int) -> Answers:
    limits = SchedulerLimits(
        _MAX_NUM_SEQS,
        _MAX_BATCHED_TOKENS,
        prefix_cache=False,
        max_draft_tokens=max_draft_tokens,
    )
    engine = Engine(runner, limits)
    tokens: SequenceTokens = {}
    commands = workload.submits(run)
    started_at = 0.0
    while commands or engine.has_work:
        for output in engine.step(commands):
            assert isinstance(output, StepOutput)
            tokens.setdefault(output.sequence_id, []).append(output.token_id)
        commands = []
        if not started_at and len(tokens) == len(workload.prompts):
            started_at = time.perf_counter()
    return Answers(tokens, time.perf_counter() - started_at, engine.load())


def measured(runner: TorchRunner, workload: Workload, num_runs: int) -> WorkloadRow:
    """Raises `ValueError` if a draft changes a token."""
    plain, drafted = [], []
    for run in range(num_runs):
        plain.append(answered(runner, workload, 0, run))
        drafted.append(answered(runner, workload, _MAX_DRAFT_TOKENS, run))
        if plain[-1].tokens != drafted[-1].tokens:
            raise ValueError(f"{workload.name}: other tokens with drafts")
    last = drafted[-1]
    return WorkloadRow(
        workload=workload.name,
        num_users=len(workload.prompts),
        plain_tokens_per_s=_rate(plain),
        drafted_tokens_per_s=_rate(drafted),
        num_tokens=last.num_tokens,
        num_drafted=last.load.num_drafted_tokens,
        num_accepted=last.load.num_accepted_tokens,
    )


def _rate(runs: Sequence[Answers]) -> float:
    return statistics.median(one.num_tokens / one.seconds for one in runs)


def _show(title: str, rows: Sequence[WorkloadRow]) -> None:
    table = Table("answers", title=title)
    for heading in ("users", "tok/s", "with drafts", "ratio", "tokens", "drafted", "accepted"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.workload,
            str(row.num_users),
            f"{row.plain_tokens_per_s:.1f}",
            f"{row.drafted_tokens_per_s:.1f}",
            f"{row.speedup:.2f}",
            str(row.num_tokens),
            str(row.num_drafted),
            str(row.num_accepted),
        )
    console().print(table)


def main(
    model: Annotated[str, typer.Option(help="As `warren worker` takes it.")] = "smollm2",
    weights: Annotated[
        str, typer.Option("--format", help="A dtype or a packed format.")
    ] = "bfloat16",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 256,
    runs: Runs = 3,
    out: Out = RESULTS,
) -> None:
    directory = store.resolve(model)
    is_dtype = weights in ("bfloat16", "float32")
    runner = load_runner(
        directory,
        RunnerLimits(
            max_num_seqs=_MAX_NUM_SEQS,
            max_num_batched_tokens=_MAX_BATCHED_TOKENS,
            max_seq_len=2048,
        ),
        dtype=weights if is_dtype else "auto",
        weight_format="auto" if is_dtype else weights,
        device="cpu",
    )
    if not can_check_drafts(runner.decoder):
        raise typer.BadParameter("drafts are checked by the fused decoder only")
    work = workloads(Tokenizer.load(directory), tokens)
    for workload in work:  # warms up
        answered(runner, workload, 0, run=-1)
    rows = [measured(runner, workload, runs) for workload in work]
    runner.close()
    _show(f"{store.served_name(model)}, {weights}", rows)
    about = {**describe([]), "model": store.served_name(model), "format": weights}
    write_json(out / "speculation.json", {**about, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    typer.run(main)

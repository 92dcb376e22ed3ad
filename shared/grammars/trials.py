"""Output constraints as llguidance grammars, and trial compilation in a sandbox process.

llguidance limits most of its work, but not all: ``multipleOf``, intersections of patterns and
recursive rules can take hours, all memory, or overflow the stack and crash the process. Each
constraint is therefore compiled in a separate process first (`shared.grammars.sandbox`).
"""

import asyncio
import functools
import json
import logging
import os
import queue
import select
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec
from llguidance import LLMatcher, LLParserLimits
from msgspec import Struct

from shared.grammars.schemas import for_generation
from shared.messages import Constraint
from shared.telemetry import floods
from shared.turns import TenantThreads

logger = logging.getLogger(__name__)

LIMITS = LLParserLimits(
    # The fuel for building the lexer allows about a second, that of a step some tens of
    # milliseconds.
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
ENTRY_RULE = "entry_"
"""The beginning of the names of rules that stand for a token, if the vocabulary has a token with
their text. Only the worker knows its id. Special tokens, as tags of calls often are, match no
text."""
CALL_CAPTURE = "tool_call"
"""The capture in a grammar whose text is a tool call."""
TOO_COSTLY = "it takes too much time or memory to compile"
_MAX_PROCESSES = 2
"""Processes that check the constraints of as many tenants at once. Each is started when it is
needed, and replaced when a constraint has ended it. It takes 40 MB, or up to 210 MB beside the
worst constraints."""
_MAX_WAIT_S = 10.0
"""Seconds to wait for the trials of other requests."""
_MAX_TRIAL_S = 30.0
"""Seconds before a trial is abandoned. A trial limits itself to a second of CPU time; this covers a
machine that hangs."""
_MAX_VERDICTS = 256


def grammar_source(constraint: Constraint) -> str:
    """Convert a constraint to a llguidance grammar. Raises `ValueError`."""
    match constraint.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(_json_schema(constraint.source))
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.source)
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.source)


def _json_schema(source: str) -> str:
    try:
        return json.dumps(for_generation(json.loads(source)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


class Task(Struct, frozen=True, kw_only=True):
    """A constraint to compile, or a grammar of llama.cpp (``gbnf``) to translate."""

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    source: str


class TrialResult(Struct, frozen=True, kw_only=True):
    """The result of a task."""

    problem: str = ""
    """The problem, or an empty string."""
    lark: str = ""
    """The translation."""


CONFINED = ""
"""What the sandbox says when it begins; anything else is the reason why it is not confined."""
_Answer = TypeVar("_Answer")
_Process: TypeAlias = subprocess.Popen[bytes]


class Trials:
    """Checks whether constraints can be compiled, for each tenant in sequence. Thread-safe.

    Verdicts are remembered for their tenant only: the time of an answer would tell other tenants
    what has been asked for.
    """

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._started: set[_Process] = set()
        weakref.finalize(self, _end_all, self._started)
        self._verdicts: OrderedDict[tuple[str, Task], TrialResult] = OrderedDict()
        self._threads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, TenantThreads]
        self._threads = weakref.WeakKeyDictionary()

    async def problem(self, constraint: Constraint, tenant: str = "") -> str:
        """The problem with a constraint, or an empty string. Tenants take turns, and a tenant whose
        trials take long waits for the trials of others. Raises `Overloaded`."""
        return (await self._verdict(_task(constraint), tenant)).problem

    def problem_now(self, constraint: Constraint, tenant: str = "") -> str:
        """The blocking form of `problem`; it takes about a second at most."""
        return self._verdict_now(_task(constraint), tenant).problem

    async def translate(self, grammar: str, tenant: str = "") -> str:
        """A grammar of llama.cpp in Lark, in the tenant's turn. Raises `ValueError` with its
        problem, and `Overloaded`."""
        return _lark(await self._verdict(Task(kind="gbnf", source=grammar), tenant))

    def translate_now(self, grammar: str, tenant: str = "") -> str:
        """The blocking form of `translate`."""
        return _lark(self._verdict_now(Task(kind="gbnf", source=grammar), tenant))

    async def _verdict(self, task: Task, tenant: str) -> TrialResult:
        if (known := self._verdicts.get((tenant, task))) is not None:
            return known
        loop = asyncio.get_running_loop()
        if (threads := self._threads.get(loop)) is None:
            threads = TenantThreads(_MAX_PROCESSES, "grammar-trials", only_wait=True)
            self._threads[loop] = threads
        work = functools.partial(self._verdict_now, task, tenant)
        return await threads.run(tenant, work, max_wait_s=_MAX_WAIT_S)

    def _verdict_now(self, task: Task, tenant: str) -> TrialResult:
        verdict = self._verdicts.get((tenant, task))
        if verdict is None:
            verdict = self._try(task)
            self._verdicts[tenant, task] = verdict
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def _try(self, task: Task) -> TrialResult:
        process = self._next_process()
        try:
            answer = _ask(process, task)
        except BaseException:
            self._end(process)
            raise
        if answer is not None:
            self._idle.put(process)
            return answer
        self._end(process)
        with suppress(OSError):  # the next trial tries again, and reports it
            # Another tenant does not wait for the start that this constraint has made necessary.
            self._idle.put(self._start())
        facts = {"returncode": process.returncode}
        floods.warn(logger, "constraint rejected", "constraint rejected", facts)
        return TrialResult(problem=TOO_COSTLY)

    def _next_process(self) -> _Process:
        with suppress(queue.Empty):
            while (process := self._idle.get_nowait()).poll() is not None:
                self._end(process)
            return process
        return self._start()

    def _start(self) -> _Process:
        process = _start()
        self._started.add(process)
        return process

    def _end(self, process: _Process) -> None:
        self._started.discard(process)
        _end_all([process])


def _task(constraint: Constraint) -> Task:
    return Task(kind=constraint.kind, source=constraint.source)


def _lark(verdict: TrialResult) -> str:
    if verdict.problem:
        raise ValueError(verdict.problem)
    return verdict.lark


def _start() -> _Process:
    process = subprocess.Popen(  # noqa: S603 - no shell; the module is one of this package
        [sys.executable, "-m", f"{__package__}.sandbox"],
        cwd=Path(__file__).parents[__name__.count(".")],
        # Nothing else: the environment of a service contains its secrets.
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    reason = _read(process, str)
    if reason != CONFINED:
        logger.warning("grammar sandbox not confined", extra={"reason": reason})
    return process


def _ask(process: _Process, task: Task) -> TrialResult | None:
    """Ask the sandbox for its result; None if the process died."""
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    return _read(process, TrialResult)


def _read(process: _Process, kind: type[_Answer]) -> _Answer | None:
    """The next answer of a sandbox; None if the process died."""
    assert process.stdout is not None
    answers = select.poll()  # unlike `select.select`, it takes descriptors above 1,023
    answers.register(process.stdout, select.POLLIN)
    answer = process.stdout.readline() if answers.poll(_MAX_TRIAL_S * 1000) else b""
    return msgspec.json.decode(answer, type=kind) if answer.endswith(b"\n") else None


def _end_all(processes: Iterable[_Process]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


TRIALS = Trials()
"""The trials of this process."""

"""Output constraints as llguidance grammars, and trial compilation in a sandbox process.

llguidance limits most of its work, but not all: ``multipleOf``, intersections of patterns and
recursive rules can take hours, all memory, or overflow the stack and crash the process. Each
constraint is therefore compiled in a separate process first (`shared.grammars.sandbox`).
"""

import asyncio
import json
import logging
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits

from shared.errors import Overloaded
from shared.grammars.json_schemas import for_generation
from shared.grammars.turns import Turns
from shared.messages import Constraint

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
CALLS_TAG = "<[TOOL_CALLS]>"
"""In a grammar: Mistral's token before tool calls, whose id only the worker knows."""
CALL_CAPTURE = "tool_call"
"""The capture in a grammar whose text is a tool call."""
TOO_COSTLY = "it takes too much time or memory to compile"
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


class Trials:
    """Checks whether constraints can be compiled, one at a time. Thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_free = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-trials")
        self._verdicts: OrderedDict[Constraint, str] = OrderedDict()
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Turns]
        self._turns = weakref.WeakKeyDictionary()

    async def problem(self, constraint: Constraint, tenant: str = "") -> str:
        """The problem with a constraint, or an empty string. Tenants take turns, and one whose
        trials take long waits for those of others. Raises `Overloaded`."""
        if (known := self._verdicts.get(constraint)) is not None:
            return known
        loop = asyncio.get_running_loop()
        turns = self._turns.setdefault(loop, Turns())
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await turns.take(tenant)
                began = time.monotonic()
                trial = loop.run_in_executor(self._thread, self.problem_now, constraint)
                # The turn lasts as long as the trial, which goes on without its request.
                trial.add_done_callback(lambda _: turns.leave(tenant, time.monotonic() - began))
                return await asyncio.shield(trial)
        except TimeoutError:
            raise Overloaded("Too many constraints are waiting to be checked.") from None

    def problem_now(self, constraint: Constraint) -> str:
        """The blocking form of `problem`; it takes about a second at most."""
        with self._is_free:
            verdict = self._verdicts.get(constraint)
            if verdict is None:
                verdict = self._try(constraint)
                self._verdicts[constraint] = verdict
                if len(self._verdicts) > _MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            return verdict

    def _try(self, constraint: Constraint) -> str:
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
            weakref.finalize(self, _end, self._process)
        answer = _ask(self._process, constraint)
        if answer is not None:
            return answer
        _end(self._process)
        logger.warning("constraint rejected", extra={"returncode": self._process.returncode})
        self._process = None
        return TOO_COSTLY


TRIALS = Trials()
"""The trials of this process."""


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "shared.grammars.sandbox"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _ask(process: subprocess.Popen[bytes], constraint: Constraint) -> str | None:
    """Ask the sandbox for its result; None if the process died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(constraint) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    has_news, _, _ = select.select([process.stdout], [], [], _MAX_TRIAL_S)
    answer = process.stdout.readline() if has_news else b""
    return msgspec.json.decode(answer, type=str) if answer.endswith(b"\n") else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()

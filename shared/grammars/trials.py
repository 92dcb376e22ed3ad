"""What answers have to match, as llguidance takes it, and tried where a bad one does no harm.

llguidance bounds most of its work, but not all: numbers that have to be multiples, patterns that
have to match together and rules that lead to rules cost hours, all memory, or the stack and with it
the process. So each constraint is compiled in a process of its own first
(`shared.grammars.sandbox`).
"""

import asyncio
import logging
import select
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits

from shared.errors import Overloaded
from shared.messages import Constraint

logger = logging.getLogger(__name__)

LIMITS = LLParserLimits(
    # What building the lexer may cost, about a second at worst; a step, some tens of milliseconds.
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
JSON_WHITESPACE = r"[ \t\n]{0,16}"
"""Room for any indentation, but no endless blank page."""
TOO_COSTLY = "it takes too much time or memory to compile"
_MAX_WAIT_S = 10.0
"""For the trials of others."""
_MAX_TRIAL_S = 30.0
"""A trial ends itself after a second of computing; this is for a machine that has stopped."""
_MAX_VERDICTS = 256


def grammar_source(constraint: Constraint) -> str:
    """The constraint as llguidance takes it. Raises `ValueError`."""
    match constraint.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                constraint.source, overrides={"whitespace_pattern": JSON_WHITESPACE}
            )
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.source)
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.source)


class Trials:
    """Finds out whether constraints can be compiled, one at a time; may be used by many threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_free = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-trials")
        self._verdicts: OrderedDict[Constraint, str] = OrderedDict()

    async def problem(self, constraint: Constraint) -> str:
        """What is wrong with it; nothing if nothing is. Raises `Overloaded`."""
        if (known := self._verdicts.get(constraint)) is not None:
            return known
        trial = asyncio.get_running_loop().run_in_executor(
            self._thread, self.problem_now, constraint
        )
        try:
            return await asyncio.wait_for(trial, _MAX_WAIT_S)
        except TimeoutError:
            raise Overloaded("Too many constraints wait to be checked.") from None

    def problem_now(self, constraint: Constraint) -> str:
        """The same; blocks for a second or so at worst."""
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
        logger.warning("constraint refused", extra={"returncode": self._process.returncode})
        self._process = None
        return TOO_COSTLY


TRIALS = Trials()
"""Those of this process."""


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "shared.grammars.sandbox"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _ask(process: subprocess.Popen[bytes], constraint: Constraint) -> str | None:
    """The verdict; None if the process died of it, or was dead before."""
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

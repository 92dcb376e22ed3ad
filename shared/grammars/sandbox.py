"""The sandbox process for trial compilation: one task per input line, one result per output line.

It exits at the end of its input, and is killed by its limits if a constraint is too costly. It has
no environment, and once it has begun, no files, network or other processes.
"""

import os
import re
import resource
import signal
import sys
from collections.abc import Sequence

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from shared.grammars import gbnf
from shared.grammars.confinement import confine
from shared.grammars.problems import explained
from shared.grammars.trials import CONFINED, LIMITS, Task, TrialResult, grammar_source
from shared.messages import Constraint
from shared.turns import NICENESS

_MAX_CPU_S = 1.0
"""Seconds. The largest schema that a request may contain, of 2,000 properties, takes 0.5 s (AMD
EPYC Milan)."""
_MAX_BYTES = 1 << 30
_MAX_STACK_BYTES = 4 << 20
"""Half of a thread's stack, so that a constraint that passes here also compiles in a worker."""
_SPECIAL_TOKEN = re.compile(r"<[^<>\s\[\]]+>")
_TOKEN_IDS = re.compile(r"<\[[^<>\[\]]*\]>")


class _Bytes:
    """A byte-level vocabulary with every special token that a grammar names. Only the worker can
    check which of these exist."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, special_tokens: Sequence[str]) -> None:
        special = [b"<end>", *(token.encode() for token in special_tokens)]
        self.tokens = [*(bytes([byte]) for byte in range(256)), *special]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def problem(constraint: Constraint) -> str:
    """The problem with a constraint, or an empty string."""
    named: set[str] = set()
    if constraint.kind == "lark":
        named.update(_SPECIAL_TOKEN.findall(constraint.source))
        known_ids = _TOKEN_IDS.sub("<[0]>", constraint.source)
        constraint = msgspec.structs.replace(constraint, source=known_ids)
    try:
        source = grammar_source(constraint)
    except ValueError as error:
        return explained(str(error))
    vocabulary = LLTokenizer(TokenizerWrapper(_Bytes(sorted(named))))
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return explained(matcher.get_error())


def verdict(task: Task) -> TrialResult:
    """The result of a task."""
    if task.kind != "gbnf":
        return TrialResult(problem=problem(Constraint(kind=task.kind, source=task.source)))
    try:
        return TrialResult(lark=gbnf.to_lark(task.source))
    except ValueError as error:
        return TrialResult(problem=str(error))


_WARM_UP = (
    Task(kind="json_schema", source='{"type": "object"}'),
    Task(kind="regex", source="(unclosed"),
    Task(kind="gbnf", source='root ::= "a"'),
)
"""Compiled before the process is confined, because modules that are imported on first use cannot be
imported later."""


def main() -> None:
    """Process tasks until the input ends."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (_MAX_STACK_BYTES, _MAX_STACK_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for task in _WARM_UP:
        verdict(task)
    try:
        confine()
    except OSError as error:
        _answer(str(error))
    else:
        _answer(CONFINED)
    for line in sys.stdin.buffer:
        # The default action of the signal ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_S)
        answer = verdict(msgspec.json.decode(line, type=Task))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(answer)


def _answer(answer: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

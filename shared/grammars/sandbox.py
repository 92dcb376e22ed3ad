"""The process in which constraints are tried: one a line, the problem with it a line.

It ends with its input, and dies of a constraint that costs too much.
"""

import re
import resource
import signal
import sys
from collections.abc import Sequence

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from shared.grammars.trials import LIMITS, grammar_source
from shared.messages import Constraint

_MAX_CPU_S = 1.0
"""The longest schema that a request may bear, of 2,000 properties, takes 0.5 s (AMD EPYC Milan)."""
_MAX_BYTES = 1 << 30
_MAX_STACK_BYTES = 4 << 20
"""Half of what a thread has, so that what passes here passes there."""
_SPECIAL_TOKEN = re.compile(r"<[^<>\s\[\]]+>")
_TOKEN_IDS = re.compile(r"<\[[^<>\[\]]*\]>")


class _Bytes:
    """A vocabulary of bytes, and of whatever special tokens a grammar names: which of them there
    are is for the worker to say."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, special_tokens: Sequence[str]) -> None:
        special = [b"<end>", *(token.encode() for token in special_tokens)]
        self.tokens = [*(bytes([byte]) for byte in range(256)), *special]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def problem(constraint: Constraint) -> str:
    """What is wrong with it; nothing if nothing is."""
    named: set[str] = set()
    if constraint.kind == "lark":
        named.update(_SPECIAL_TOKEN.findall(constraint.source))
        known_ids = _TOKEN_IDS.sub("<[0]>", constraint.source)
        constraint = msgspec.structs.replace(constraint, source=known_ids)
    try:
        source = grammar_source(constraint)
    except ValueError as error:
        return str(error)
    vocabulary = LLTokenizer(TokenizerWrapper(_Bytes(sorted(named))))
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error())


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (_MAX_STACK_BYTES, _MAX_STACK_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        # Nobody handles the signal: it ends the process, whatever that is at.
        signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_S)
        answer = problem(msgspec.json.decode(line, type=Constraint))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

"""Constraints whose compilation would block, fill or end its process."""

import asyncio
import json
import os
import resource
import time
from collections.abc import Iterator
from typing import Any, Literal

import psutil
import pytest

from shared.grammars import TOO_COSTLY, Trials
from shared.messages import Constraint
from shared.turns import NICENESS

_MAX_CPU_S = 15.0
"""A second for the trial, and as long as it takes to start the process that replaces one."""
_PATIENT_S = 3600.0
Kind = Literal["json_schema", "regex", "lark"]


def constraint(kind: Kind, source: Any) -> Constraint:
    text = source if isinstance(source, str) else json.dumps(source)
    return Constraint(kind=kind, source=text)


def doubled(rule: str) -> str:
    """Sixty rules, each of which contains the next rule twice."""
    steps = (f"{rule}{k}: {rule}{k + 1} {rule}{k + 1}" for k in range(60))
    return "\n".join([f"start: {rule}0", *steps, f'{rule}60: "a"'])


def chained(length: int) -> str:
    steps = (f'r{k}: r{k + 1} | "a"' for k in range(length))
    return "\n".join(["start: r0", *steps, f'r{length}: "a"'])


EXPONENTIAL = "(a|b)*a(a|b){18}"
PATTERNS = [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{k}}}$"} for k in range(10, 300)]
NULLABLE = [f"r{k}: r{k + 1}? r{k + 1}? r{k + 1}? r{k + 1}?" for k in range(1000)]
REFUSED = [
    ("regex", r"[\p{L}--\p{Lu}]*" * 2000),
    ("regex", "(" * 20000 + "a" + ")" * 20000),
    ("json_schema", {"allOf": [{"anyOf": [{"const": [k, i]} for i in "ab"]} for k in range(30)]}),
    ("lark", "start: " + "(" * 30000 + '"a"' + ")" * 30000),
    ("lark", f"start: T\nT: /{EXPONENTIAL}/ & ~/(a|b)*b(a|b){{17}}/ & /(ab|ba)*(a|b){{22}}/"),
    ("lark", doubled("T")),
    ("lark", chained(3000)),
    ("lark", "\n".join(["start: r0", *NULLABLE, 'r1000: "a"?'])),
]
BORNE = [
    ("regex", EXPONENTIAL),
    ("regex", "(a|b)*a(a|b){200}"),
    ("regex", "(((a{1,1000}){1,1000}){1,1000}){1,1000}"),
    ("regex", "|".join(f"x{k:05d}y" for k in range(7000))),
    ("json_schema", {"type": "string", "pattern": "(a|b|ab)*" * 500 + "c"}),
    ("json_schema", {"type": "array", "items": {"type": "string"}, "minItems": 10**9}),
    ("json_schema", {"anyOf": [{"const": k} for k in range(3000)]}),
    ("lark", doubled("r")),
    ("lark", "start: e\ne: e e | /a+/ | /[ab]*/ | /.*/"),
    ("lark", 'start: <|im_end|> <[600-700]> "a"'),
]


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """A process that waits for a core, at a lower priority than the tests, is not taken for one
    that hangs, and nobody is sent away who waits for it."""
    with pytest.MonkeyPatch.context() as patched:
        for limit in ("_MAX_TRIAL_S", "_MAX_WAIT_S"):
            patched.setattr(f"shared.grammars.trials.{limit}", _PATIENT_S)
        yield


@pytest.fixture(scope="module")
def trials() -> Trials:
    trials = Trials()
    assert not trials.problem_now(constraint("regex", "a"))
    return trials


def cpu_s() -> float:
    """The CPU time of the processes that this process has started, of the ended as well."""
    own = psutil.Process()
    ended, living = own.cpu_times(), [process.cpu_times() for process in own.children()]
    used_s = [ended.children_user, ended.children_system]
    return sum(used_s) + sum(times.user + times.system for times in living)


@pytest.mark.parametrize(("kind", "source"), REFUSED)
def test_a_bomb_is_refused_soon(trials: Trials, kind: Kind, source: Any) -> None:
    before = cpu_s()

    assert trials.problem_now(constraint(kind, source))

    assert cpu_s() - before < _MAX_CPU_S


@pytest.mark.parametrize(("kind", "source"), BORNE)
def test_what_only_looks_like_a_bomb_is_borne(trials: Trials, kind: Kind, source: Any) -> None:
    before = cpu_s()

    assert not trials.problem_now(constraint(kind, source))

    assert cpu_s() - before < _MAX_CPU_S


def test_a_bomb_takes_nothing_from_this_process(trials: Trials) -> None:
    before = psutil.Process().memory_info().rss
    assert trials.problem_now(constraint("json_schema", {"allOf": PATTERNS})) == TOO_COSTLY

    assert psutil.Process().memory_info().rss - before < 50 << 20


@pytest.fixture
def many_files() -> Iterator[None]:
    """So many files are open that the next file has a descriptor above 1,023."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4096), before[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_a_process_with_many_files_tries_constraints() -> None:
    trials = Trials()

    assert not trials.problem_now(constraint("regex", "[a-z]+"))


async def test_the_event_loop_goes_on() -> None:
    others = set(psutil.Process().children())
    trials = Trials()
    assert not trials.problem_now(constraint("regex", "sixth"))
    (process,) = set(psutil.Process().children()) - others

    process.suspend()  # so that the trial cannot end before the loop goes on
    trial = asyncio.create_task(trials.problem(constraint("regex", "seventh")))
    for _ in range(10):
        await asyncio.sleep(0.001)
    was_held_up = trial.done()
    process.resume()

    assert not was_held_up
    assert not await trial


async def test_a_tenants_bombs_do_not_hold_up_another(trials: Trials) -> None:
    ended: list[str] = []

    async def check(tenant: str, kind: Kind, source: Any) -> None:
        await trials.problem(constraint(kind, source), tenant)
        ended.append(tenant)

    bombs = [{"type": "integer", "multipleOf": 999_900 + number} for number in range(2)]
    async with asyncio.TaskGroup() as tasks:
        for bomb in bombs:
            tasks.create_task(check("mallory", "json_schema", bomb))
        await asyncio.sleep(0)
        tasks.create_task(check("alice", "regex", "of alice"))

    assert "alice" in ended[:2]


def test_a_verdict_is_remembered() -> None:
    others = set(psutil.Process().children())
    trials = Trials()
    unclosed = constraint("regex", "(unclosed")
    verdict = trials.problem_now(unclosed)
    (process,) = set(psutil.Process().children()) - others
    process.kill()

    assert trials.problem_now(unclosed) == verdict != ""
    assert set(psutil.Process().children()) - others == {process}


def test_a_verdict_is_remembered_for_its_tenant_only() -> None:
    others = set(psutil.Process().children())
    trials = Trials()
    assert not trials.problem_now(constraint("regex", "eighth"), "alice")
    (process,) = set(psutil.Process().children()) - others
    process.suspend()  # it could not answer
    known = trials.problem_now(constraint("regex", "eighth"), "alice")
    process.kill()
    process.wait()

    asked = trials.problem_now(constraint("regex", "eighth"), "bob")

    assert known == asked == ""
    assert set(psutil.Process().children()) - others != {process}


async def test_a_grammar_of_llama_cpp_is_translated_in_the_process() -> None:
    trials = Trials()

    lark = await trials.translate('root ::= "a"', "alice")

    assert lark == trials.translate_now('root ::= "a"') == '%llguidance {}\nstart: PART\nPART: "a"'
    with pytest.raises(ValueError, match="there is no rule named root"):
        await trials.translate('rule ::= "a"', "alice")


def test_a_process_that_was_killed_is_started_again() -> None:
    others = set(psutil.Process().children())
    trials = Trials()
    assert not trials.problem_now(constraint("regex", "first"))
    (process,) = set(psutil.Process().children()) - others
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)

    assert not trials.problem_now(constraint("regex", "second"))


def test_a_process_that_a_bomb_has_ended_is_replaced_before_the_next_trial() -> None:
    others = set(psutil.Process().children())
    trials = Trials()

    assert trials.problem_now(constraint("lark", chained(3001))) == TOO_COSTLY

    (replacement,) = set(psutil.Process().children()) - others
    assert not trials.problem_now(constraint("regex", "fourth"))
    assert set(psutil.Process().children()) - others == {replacement}


async def test_processes_yield_to_the_engine_but_not_to_everything() -> None:
    others = set(psutil.Process().children())
    trials = Trials()

    assert not await trials.problem(constraint("regex", "third"))

    (process,) = set(psutil.Process().children()) - others
    assert process.nice() == min(psutil.Process().nice() + NICENESS, 19)

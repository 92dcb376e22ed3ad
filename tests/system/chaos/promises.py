"""What is promised of answers beside their text: forks, receipts, audits and deadlines.

Each of them has callers of its own, which check it while workers and gateways are killed.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from joserfc.jwk import OKPKey

from gateway.intake.receipts import InvalidReceipt, verified
from shared.errors import DeadlineExceeded
from shared.messages import Receipt, hash_text
from tests.system.chaos.callers import Caller, Question, Stream, StreamFailed, Tally
from tests.system.chaos.campaign import (
    Campaign,
    Plan,
    Row,
    equals_undisturbed,
    patient_client,
)
from tests.system.chaos.deployment import Deployment

_FORKS_PER_QUESTION = 3
_OTHER_SEED = 1_000
_POLL_S = 0.05
_SHORTEST_S, _LONGEST_S = 0.5, 10.0
"""Of deadlines. An undisturbed answer takes 2 to 4 seconds."""
_AUDITED_WITHIN_S = 120.0
_QUIET_S = 5.0
"""Seconds without a new outcome after which no audit is under way any more."""
_AUDITS = "warren_gateway_audits_total{"


AUDIT_ALL = "--audit-share=1"


def sign_with_key_in(directory: Path) -> str:
    """The option of gateways that sign receipts with a new key, which is kept in ``directory``."""
    keys = directory / "receipts.pem"
    keys.write_bytes(OKPKey.generate_key("Ed25519").as_pem(private=True))
    return f"--receipt-keys-file={keys}"


async def promise_rows(
    deployment: Deployment, expected: Mapping[Question, str], num_callers: int, plan: Plan
) -> list[Row]:
    """Run the faults of a plan, whose names begin with the promise that is checked beside them."""
    forks = await Forks.of(deployment, list(expected))
    checks = {
        "forks": forks.check,
        "receipts": (await Receipts.of(deployment)).check,
        "audits": equals_undisturbed,
        "deadlines": is_exact_or_late,
    }
    rows = []
    for name, (fault, num_tries) in plan.items():
        check = checks[name.split(":")[0]]
        row = await Campaign(deployment, expected, num_callers, check=check).under(
            name, fault, num_tries
        )
        await _check_audits(deployment, row)
        rows.append(row)
    return rows


class Fork(NamedTuple):
    """What an answer becomes if it goes on as the answer to ``question`` at a token."""

    at: int
    question: Question
    text: str


class Forks:
    """Checks that a fork of a stream, which may still run, equals the undisturbed fork, and that
    the stream goes on."""

    def __init__(self, undisturbed: Mapping[Question, Sequence[Fork]]) -> None:
        self._undisturbed = undisturbed

    @classmethod
    async def of(cls, deployment: Deployment, questions: Sequence[Question]) -> "Forks":
        async with patient_client() as client:
            caller = Caller(client, deployment.urls, deployment.tenants[0])
            forks = await asyncio.gather(*(_undisturbed(caller, one) for one in questions))
        return cls(dict(zip(questions, forks, strict=True)))

    async def check(self, caller: Caller, question: Question, expected: str, tally: Tally) -> None:
        fork = random.choice(self._undisturbed[question])
        with_ids = replace(question, has_receipt=True)
        origin = caller.stream(with_ids, tally, is_kept=True)
        reading = asyncio.create_task(caller.read(origin))
        try:
            while not reading.done() and len(origin.token_ids) < fork.at:  # noqa: ASYNC110 - the stream tells nobody
                await asyncio.sleep(_POLL_S)
            tally.noted["of running streams"] += not origin.is_done
            if not reading.done() or reading.exception() is None:
                other = await caller.read(caller.fork(origin, fork.at, fork.question))
                tally.compare(other.text, fork.text)
        finally:
            await reading
        tally.compare(origin.text, expected)


async def _undisturbed(caller: Caller, question: Question) -> Sequence[Fork]:
    dice = random.Random(question.seed)
    places = [dice.randint(0, question.max_tokens) for _ in range(_FORKS_PER_QUESTION)]
    others = [
        replace(question, seed=question.seed + _OTHER_SEED * (k + 1)) for k in range(len(places))
    ]
    origin = await caller.read(caller.stream(question, Tally(), is_kept=True))
    forks = [caller.fork(origin, at, other) for at, other in zip(places, others, strict=True)]
    texts = [(await caller.read(fork)).text for fork in forks]
    return [Fork(*facts) for facts in zip(places, others, texts, strict=True)]


class Receipts:
    """Checks that an answer ends with a receipt of the tokens that its client has."""

    def __init__(self, published: Mapping[str, Any]) -> None:
        """``published``: the gateways' public keys."""
        self._published = published

    @classmethod
    async def of(cls, deployment: Deployment) -> "Receipts":
        async with patient_client() as client:
            answer = await client.get(f"{deployment.urls()[0]}/.well-known/jwks.json")
        return cls(answer.raise_for_status().json())

    async def check(self, caller: Caller, question: Question, expected: str, tally: Tally) -> None:
        with_receipt = replace(question, has_receipt=True)
        stream = await caller.read(caller.stream(with_receipt, tally))
        tally.compare(stream.text, expected)
        try:
            receipt = verified(stream.receipt, self._published)
        except InvalidReceipt as error:
            tally.miss(f"{stream.stream_id}: {error}")
            return
        tally.noted["with take-overs"] += len(receipt.executions) > 1
        if _stated(receipt) != _received(stream):
            tally.miss(f"{_stated(receipt)} in the receipt, {_received(stream)} received")


def _stated(receipt: Receipt) -> tuple[object, ...]:
    (choice,) = receipt.choices
    return receipt.id, choice.token_ids, choice.text_sha256, receipt.usage.completion_tokens


def _received(stream: Stream) -> tuple[object, ...]:
    token_ids = tuple(stream.token_ids)
    return stream.stream_id, token_ids, hash_text([stream.text]), len(token_ids)


async def is_exact_or_late(caller: Caller, question: Question, expected: str, tally: Tally) -> None:
    """Ask with a tight deadline: the whole answer comes, or a beginning of it and
    ``deadline_exceeded``."""
    timeout_s = random.uniform(_SHORTEST_S, _LONGEST_S)
    stream = caller.stream(replace(question, timeout_s=timeout_s), tally)
    try:
        await caller.read(stream)
    except StreamFailed as error:
        if error.code != DeadlineExceeded.code:
            raise
        tally.noted["past their deadlines"] += 1
        tally.compare(stream.text, expected[: len(stream.text)])
    else:
        tally.compare(stream.text, expected)


async def _check_audits(deployment: Deployment, row: Row) -> None:
    """Wait until the audits of all answers so far have ended: no two workers may disagree."""
    audits, quiet_since = Counter[str](), time.monotonic()
    until = quiet_since + _AUDITED_WITHIN_S
    async with patient_client() as client:
        while time.monotonic() < min(until, quiet_since + _QUIET_S):
            await asyncio.sleep(1.0)
            now = Counter[str]()
            for url in deployment.urls():
                now += _audits_in((await client.get(f"{url}/metrics")).text)
            if now != audits:
                audits, quiet_since = now, time.monotonic()
    if audits["different"] or not audits["equal"]:
        row.tally.miss(f"{dict(audits)} audits")
    row.tally.noted["audits equal"] = audits["equal"]


def _audits_in(metrics: str) -> Counter[str]:
    """The audits that a gateway has counted, by their outcomes."""
    found: Counter[str] = Counter()
    for line in metrics.splitlines():
        if line.startswith(_AUDITS):
            found[line.split('outcome="')[1].split('"')[0]] += int(float(line.split()[-1]))
    return found

"""Has a share of the finished answers computed again by other workers.

Where every answer is a function of its request, two workers of the same model that disagree cannot
both be right: a memory is broken, a checkpoint is another one, or a worker runs with other options.

An audit is a job of the batch class for the same prompts and the same seed. It carries the tokens
that it expects, which the worker checks as drafts, so that it costs a fraction of the answer. It is
cancelled at its first token that differs. If a third worker is there, it says which of the two is
the odd one.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol, TypeAlias

from msgspec import structs
from prometheus_client import Counter

from gateway.fleet.live_workers import LiveWorkers
from gateway.log.cursor import LogEnd, LogFacts
from gateway.log.relay import LogRelay
from gateway.log.reply_queues import ReplyLog, ReplyQueues, new_id
from shared.errors import WarrenError
from shared.log import LogReader, TokenChain
from shared.messages import ChatPrompt, GenerationJob, JobClass
from shared.telemetry import incidents
from shared.telemetry.metrics import Catalog

logger = logging.getLogger(__name__)

PREFIX = "audit-"
"""The beginning of the request ids of audits."""
_MAX_TRIES = 4
"""An audit that comes to the worker that it audits is published again."""
_MAX_AT_ONCE = 4
_MAX_WAITING = 64
_MAX_DIFFERENCES = 20
_PATIENCE_S = 600.0
"""Seconds after which an audit is given up: batch jobs wait for free slots."""

Outcome: TypeAlias = Literal["equal", "different", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("equal", "different", "skipped")
Tokens: TypeAlias = tuple[tuple[int, ...], ...]
"""The tokens of each choice."""


class Answer(NamedTuple):
    """An answer that a single worker has computed."""

    job: GenerationJob
    worker: str
    numerics: str
    tokens: Tokens


class Disagreement(NamedTuple):
    """The first token in which two answers differ; None stands for the end of a choice."""

    choice: int
    position: int
    stated: int | None
    drawn: int | None


class Audited(NamedTuple):
    """What another worker has computed of an answer."""

    worker: str
    difference: Disagreement | None


class AuditFinding(NamedTuple):
    """An answer about which two workers disagree."""

    found_at: float
    """Unix time in seconds."""
    request_id: str
    model: str
    worker: str
    """The worker whose answer was sent."""
    other_worker: str
    suspect: str | None
    """The worker with which a third worker disagrees; None if there is none."""
    disagreement: Disagreement


class Opens(Protocol):
    """Publishes a job and relays its log: `gateway.log.registry.Relays.open`."""

    def __call__(
        self, log: ReplyLog, job: GenerationJob, facts: LogFacts, *, lane: JobClass
    ) -> AbstractAsyncContextManager[LogRelay]: ...


def difference(stated: Tokens, chains: Sequence[TokenChain]) -> Disagreement | None:
    """The first token of an unfinished or finished recomputation that is not the stated token."""
    for choice, (tokens, chain) in enumerate(zip(stated, chains, strict=True)):
        drawn = chain.token_ids
        for position, (one, other) in enumerate(zip(tokens, drawn, strict=False)):
            if one != other:
                return Disagreement(choice, position, one, other)
        if len(drawn) > len(tokens):
            return Disagreement(choice, len(tokens), None, drawn[len(tokens)])
        if chain.is_finished and len(drawn) < len(tokens):
            return Disagreement(choice, len(drawn), tokens[len(drawn)], None)
    return None


class Auditor:
    """Audits answers in the background, so that no request waits for its audit."""

    def __init__(
        self,
        opens: Opens,
        queues: ReplyQueues,
        workers: LiveWorkers,
        catalog: Catalog,
        share: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``share`` of the answers are audited. ``clock`` returns the Unix time."""
        self._opens = opens
        self._queues = queues
        self._workers = workers
        self._share = share
        self._clock = clock
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self.differences: deque[AuditFinding] = deque(maxlen=_MAX_DIFFERENCES)
        """The newest differences, in order."""
        self.outcomes: Counter = catalog.counter(
            "warren_gateway_audits_total",
            "Answers that were to be computed again by another worker, by the outcome: equal, "
            "different, or skipped, because no other worker was there or free, or because several "
            "workers or a worker without exact numerics had computed the answer.",
            "model",
            "outcome",
        )
        """Audits, by model and outcome."""

    def consider(self, relay: LogRelay) -> None:
        """Audit the answer of a relay that has ended, if it is drawn. An answer that was only
        repeated, for the same Idempotency-Key, was considered before."""
        job = relay.job
        if job is None or relay.repeats_earlier or relay.cursor.end is not LogEnd.FINISHED:
            return
        for outcome in OUTCOMES:  # a counter that begins with its first event shows no increase
            self.outcomes.labels(job.model, outcome)
        if not is_drawn(relay.request_id, self._share):
            return
        answer = self._audited(job, relay.cursor.reader)
        if answer is None or len(self._tasks) >= _MAX_WAITING:
            self._count(job.model, "skipped")
            return
        task = asyncio.create_task(self._audit(answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Give up the audits under way."""
        for task in self._tasks:
            task.cancel()

    def _audited(self, job: GenerationJob, reader: LogReader) -> Answer | None:
        """The answer to a job, if it can be audited: a single worker has computed all of it, whose
        tokens depend on the request alone."""
        announced = {one.worker: one for one in self._workers.of_model(job.model)}
        worker = announced.get(reader.worker or "")
        if worker is None or reader.replaced is not None or not reader.is_ended:
            return None
        if not worker.is_exact or worker.numerics != reader.run_numerics:
            return None
        tokens = tuple(tuple(chain.token_ids) for chain in reader.chains)
        return Answer(job, worker.worker, worker.numerics, tokens)

    async def _audit(self, answer: Answer) -> None:
        facts = {"request_id": answer.job.request_id, "model": answer.job.model}
        async with self._turns:
            found: Audited | None = None
            with incidents.survived("task", "answer not audited", **facts):
                found = await self._recomputed(answer, {answer.worker})
            if found is None or found.difference is None:
                self._count(answer.job.model, "skipped" if found is None else "equal")
                return
            self._count(answer.job.model, "different")
            suspect: str | None = None
            with incidents.survived("task", "answer not audited twice", **facts):
                suspect = await self._suspect(answer, found, found.difference)
            self._note(answer, found.worker, found.difference, suspect)

    async def _suspect(self, answer: Answer, found: Audited, differing: Disagreement) -> str | None:
        """The worker with which a third worker disagrees; None if there is no third worker, or if
        it agrees with neither."""
        third = await self._recomputed(answer, {answer.worker, found.worker})
        if third is None:
            return None
        if third.difference is None:
            return found.worker
        place = (third.difference.choice, third.difference.position)
        is_later = place > (differing.choice, differing.position)
        if is_later:
            return found.worker
        return answer.worker if third.difference == differing else None

    async def _recomputed(self, answer: Answer, excluded: set[str]) -> Audited | None:
        """What a worker that is not ``excluded`` computes; None if no such worker has done it."""
        for _ in range(_MAX_TRIES):
            others = {
                one.worker
                for one in self._workers.of_model(answer.job.model)
                if one.numerics == answer.numerics
            }
            if not others - excluded:
                return None
            try:
                found = await self._compute(answer, excluded)
            except WarrenError as error:
                facts = {"request_id": answer.job.request_id, "reason": error.code}
                logger.info("answer not audited", extra=facts)
                return None
            if found is not None and found.worker not in excluded:
                return found
        return None

    async def _compute(self, answer: Answer, excluded: set[str]) -> Audited | None:
        """What the worker computes that takes the job, unless it is ``excluded``; None if its
        numerics are others, or if several workers have computed it. Raises `WarrenError`."""
        facts = LogFacts(num_choices=answer.job.total_choices)
        job = self._job(answer, facts)
        log = self._queues.named(job.request_id)
        async with self._opens(log, job, facts, lane="batch") as relay:
            while True:
                await relay.take()
                reader = relay.cursor.reader
                if reader.worker is None or reader.replaced is not None:
                    return None
                if reader.run_numerics != answer.numerics:
                    return None
                found = difference(answer.tokens, reader.chains)
                if found is not None or relay.is_ended or reader.worker in excluded:
                    return Audited(reader.worker, found)

    def _job(self, answer: Answer, facts: LogFacts) -> GenerationJob:
        """The job of an audit. It belongs to no tenant: nobody pays for it."""
        job = answer.job
        seed = job.seed if job.seed < 1 << 63 else job.seed - (1 << 64)
        sampling = structs.replace(job.sampling, seed=seed, logprobs=None, prompt_logprobs=None)
        dated = tuple(
            structs.replace(prompt, now=prompt.now or job.created_at)
            if isinstance(prompt, ChatPrompt)
            else prompt
            for prompt in job.prompts
        )
        return structs.replace(
            job,
            request_id=new_id(PREFIX),
            prompts=dated,
            created_at=self._clock(),
            sampling=sampling,
            mode="stream",
            deadline=self._clock() + _PATIENCE_S,
            tenant="",
            key_id="",
            is_detached=False,
            is_counted=False,
            each_token=False,
            wants_prompt_text=False,
            wants_provenance=False,
            expected_ids=answer.tokens,
            publication=0,
            execution=0,
            context=facts.encode(),
            trace={},
        )

    def _count(self, model: str, outcome: Outcome) -> None:
        self.outcomes.labels(model, outcome).inc()

    def _note(self, answer: Answer, other: str, found: Disagreement, suspect: str | None) -> None:
        difference = AuditFinding(
            self._clock(),
            answer.job.request_id,
            answer.job.model,
            answer.worker,
            other,
            suspect,
            found,
        )
        self.differences.append(difference)
        _report(difference)


def is_drawn(request_id: str, share: float) -> bool:
    """Whether a request is among the ``share`` that is audited, which depends on its id alone. No
    audit is audited."""
    number = int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest())
    return number < share * (1 << 64) and not request_id.startswith(PREFIX)


def _report(difference: AuditFinding) -> None:
    found = difference.disagreement
    incidents.report(
        "audit",
        "workers disagree about an answer",
        None,
        request_id=difference.request_id,
        model=difference.model,
        worker=difference.worker,
        other_worker=difference.other_worker,
        suspect=difference.suspect,
        choice=found.choice,
        at_token=found.position,
        stated=found.stated,
        drawn=found.drawn,
    )

"""A run: a deployment, the traffic, and all findings."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from gateway.wiring import Tuning
from tests.support.deployment import processes
from tests.support.deployment.broker import RabbitNode
from tests.support.deployment.processes import WarrenProcess
from tests.support.metrics import sample
from tests.system.chaos.campaign import patient_client
from tests.system.chaos.deployment import Deployment
from tests.system.soak import traces
from tests.system.soak.answers import Answer
from tests.system.soak.batches import Batches
from tests.system.soak.client import PATIENCE_S, Client, narrow_client
from tests.system.soak.network import network
from tests.system.soak.questions import Question, answered, draw_questions
from tests.system.soak.remains import Remains, dead_letters
from tests.system.soak.tally import Tally
from tests.system.soak.traces import LoggedLines
from tests.system.soak.users import User
from tests.system.soak.watch import (
    MAX_GROWTH_BYTES,
    MIN_SETTLED_SAMPLES,
    SETTLED_AFTER_S,
    Course,
    Watch,
)

logger = logging.getLogger(__name__)

_GENERATED = "warren_worker_generation_tokens_total"


@dataclass(frozen=True)
class Plan:
    """What to send, and for how long."""

    duration_s: float
    num_users: int = 24
    num_questions: int = 200
    seed: int = 0
    detach_ttl_s: int = 40
    """How long the logs of detached streams are kept: they expire within the minute after the
    end."""
    worker_silence_s: float = Tuning().worker_silence_s
    """How long gateways wait for a worker's heartbeat. Where other programs starve the workers,
    this must be longer, because each silence counts as a fault."""
    is_provoked: bool = False
    """Whether what the broker says is disturbed while traffic is sent."""


@dataclass
class Findings:
    """All findings of a run."""

    plan: Plan
    tally: Tally = field(default_factory=Tally)
    took_s: float = 0.0
    num_generated: int = 0
    """Tokens that the workers generated."""
    courses: Mapping[str, Course] = field(default_factory=dict)
    logs: dict[str, LoggedLines] = field(default_factory=dict)
    incidents: Mapping[str, int] = field(default_factory=dict)
    """As each process has counted them."""
    provoked: Mapping[str, Counter[str]] = field(default_factory=dict)
    """How often each fault was provoked, for workers and for gateways."""
    dead_letters: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Faults of the processes and the broker; wrong answers are in the tally."""

    @property
    def is_good(self) -> bool:
        return not self.faults and not self.tally.errors


async def soak(node: RabbitNode, folder: Path, plan: Plan) -> Findings:
    """Send the traffic of ``plan``; the processes log to ``folder``."""
    findings = Findings(plan)
    dice = random.Random(plan.seed)
    async with (
        network(node, plan.seed, is_provoked=plan.is_provoked) as net,
        Deployment(
            folder,
            worker_url=net.worker_url,
            gateway_url=net.gateway_url,
            start_worker=_echo_worker,
            num_workers=2,
            num_gateways=2,
            gateway_options=[f"--detach-ttl-s={plan.detach_ttl_s}"],
            gateway_tuning={"worker_silence_s": plan.worker_silence_s},
        ) as deployment,
    ):
        async with patient_client(PATIENCE_S) as http:
            questions = draw_questions(dice, plan.num_questions)
            expected = await answered(http, deployment.urls(), questions)
        named = _named(deployment)
        remains = await asyncio.to_thread(Remains, node, deployment)
        # In a shorter run the write-ahead log is not filled several times.
        is_long = plan.duration_s > SETTLED_AFTER_S
        measures = {"broker, used": node.used_bytes} if is_long else {}
        watch = Watch({**named, "broker": node}, plan.duration_s, measures)
        traffic = _Traffic(node, deployment, folder, expected, findings.tally, dice)
        net.begin()
        logger.info("%d questions answered, traffic begins", len(expected))
        began_at = time.monotonic()
        await traffic.send(plan, watch)
        findings.took_s = time.monotonic() - began_at
        net.end()
        findings.provoked = net.provoked
        findings.courses = watch.courses
        logger.info("%d visits, now silence", findings.tally.num_visits())
        findings.faults += watch.deaths or await asyncio.to_thread(remains.find)
        findings.dead_letters = await dead_letters(node.url)
        _ask_processes(named, findings)
        await _end(named, findings)
    findings.logs = {name: traces.logged(process.log) for name, process in named.items()}
    findings.logs["broker"] = traces.logged_by_broker(node.log)
    findings.faults += _faults(findings)
    return findings


class _Traffic:
    """Run users and batches concurrently."""

    def __init__(
        self,
        node: RabbitNode,
        deployment: Deployment,
        folder: Path,
        expected: Mapping[Question, Answer],
        tally: Tally,
        dice: random.Random,
    ) -> None:
        self._deployment = deployment
        self._expected = expected
        self._tally = tally
        self._dice = dice
        self._batches = Batches(node.url_of("publisher"), folder, expected, tally, self._new_dice())

    async def send(self, plan: Plan, watch: Watch) -> None:
        """Return when all users have ended, some time after ``plan.duration_s`` at the latest."""
        is_over = asyncio.Event()
        async with (
            patient_client(PATIENCE_S) as http,
            narrow_client() as narrow,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(watch.run(is_over))
            tasks.create_task(self._batches.run(is_over))
            for _ in range(plan.num_users):
                tasks.create_task(self._use(plan, http, narrow, is_over))

    async def _use(
        self,
        plan: Plan,
        http: httpx.AsyncClient,
        narrow: httpx.AsyncClient,
        is_over: asyncio.Event,
    ) -> None:
        dice = self._new_dice()
        client = Client(
            http, narrow, self._deployment.urls(), self._tally, dice, retries=plan.is_provoked
        )
        user = User(client, self._expected, self._tally, dice)
        while not is_over.is_set():
            await user.visit()

    def _new_dice(self) -> random.Random:
        return random.Random(self._dice.random())


def _echo_worker(broker: str, log: Path) -> WarrenProcess:
    variables = {"WARREN_LOG_LEVEL": "warning", "WARREN_TOOL_PARSER": "hermes"}
    return processes.echo_worker(broker, log, "--step-ms=10", "--drain-grace-s=2", **variables)


def _named(deployment: Deployment) -> dict[str, WarrenProcess]:
    workers = {f"worker {k}": worker for k, worker in enumerate(deployment.workers, 1)}
    gateways = {f"gateway {k}": gateway for k, gateway in enumerate(deployment.gateways, 1)}
    return workers | gateways


def _ask_processes(named: Mapping[str, WarrenProcess], findings: Findings) -> None:
    living = {name: process for name, process in named.items() if process.is_alive}
    findings.incidents = {name: traces.num_incidents(one) for name, one in living.items()}
    workers = (one for name, one in living.items() if name.startswith("worker"))
    findings.num_generated = round(sum(sample(worker, _GENERATED) for worker in workers))


async def _end(named: Mapping[str, WarrenProcess], findings: Findings) -> None:
    """Terminate all processes as an orchestrator would."""
    for name, process in named.items():
        code = await asyncio.to_thread(process.terminate)
        if code:
            findings.faults.append(f"{name} ended with code {code}")


def _faults(findings: Findings) -> list[str]:
    """What the logs, the counters and the samples show."""
    is_provoked = findings.plan.is_provoked
    faults = list(_incident_faults(findings))
    for name, lines in findings.logs.items():
        faults += [f"{name} logged: {error}" for error in lines.errors]
        faults += [
            f"{name} warned {warning}" for warning in lines.unexpected(is_provoked=is_provoked)
        ]
    for name, course in findings.courses.items():
        # Erlang's allocators keep what they may need again: the broker is judged by what it uses.
        num_samples = len(course.settled(findings.plan.duration_s))
        if num_samples < MIN_SETTLED_SAMPLES:
            faults.append(f"{name} was measured only {num_samples} times")
        growth_bytes = course.growth_bytes(findings.plan.duration_s)
        if name != "broker" and growth_bytes > MAX_GROWTH_BYTES:
            faults.append(f"{name} grew by {growth_bytes / 2**20:.1f} MiB")
    faults += [f"{num} dead letters: {reason}" for reason, num in findings.dead_letters.items()]
    return faults


def _incident_faults(findings: Findings) -> Iterator[str]:
    """Incidents that were not provoked, and incidents that were not both logged and counted."""
    expected = traces.PROVOKED_INCIDENTS if findings.plan.is_provoked else set()
    num_reported: Counter[str] = Counter()
    for name, lines in findings.logs.items():
        for incident in lines.incidents:
            num_reported[name.split()[0]] += 1
            if incident.kind not in expected:
                yield f"{name} logged: {incident.line}"
        num_counted = findings.incidents.get(name)
        if num_counted not in (None, len(lines.incidents)):
            yield f"{name}: {num_counted} incidents counted, {len(lines.incidents)} logged"
    for name, num_of in findings.provoked.items():
        if num_reported[name] > num_of.total():
            yield f"{name}s: {num_reported[name]} incidents after {num_of.total()} faults"

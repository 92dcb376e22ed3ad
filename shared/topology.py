"""All exchanges, queues and routing keys, which process declares them, and who may name them.

warren.jobs     direct  <model>.<lane>    -> jobs.<model>.<lane>    declared by workers
                        <model>.near-<id> -> jobs.<model>.near-<id>  jobs whose prefix that worker
                                                                     may have in its cache
warren.suspects direct  <model>.suspect   -> jobs.<model>.suspect   jobs quarantined by workers
                        <model>.overflow  -> jobs.<model>.overflow  jobs of tenants with many that
                        and batch-overflow                          wait, set aside by workers
                        <model>.resumed-<hash> -> jobs.<model>.resumed-<hash>  jobs that have begun,
                                                                     for workers of equal numerics
                        <model>.peers-<n>-<k> -> control.worker.<id>.group  announcements to the
                                                                     workers of a group of n groups
warren.replies  topic   reply.<id>        -> reply.<id>             declared by the reader
                        reply.<user>.<id> -> reply.<user>.<id>      the same of other publishers
                        reply.<id>--<n>   -> reply.<id>--<n>        the log, recreated elsewhere
                        reply.probe-<id>  -> reply.probe-<id>       declared by gateways, to notice
                                                                    that bindings were lost
                        reply.copy-<id>   -> reply.copy-<id>        declared by gateways whose
                                                                    clients share an execution
warren.control  topic   worker.<id>       -> control.worker.<id>    commands to a worker
                        gateways          -> control.gateway.<id>   commands to all gateways
warren.usage    fanout                    -> control.gateway.<id>.usage  what API keys have used
warren.workers  fanout                    -> workers.<gateway id>   announcements
                                          -> reply.<user>.<id>.workers, for publishers
warren.dead     fanout                    -> jobs.dead              dead letters
warren.ledger   fanout                    -> ledger.records         what requests have used

The ids of gateways contain no dot. Another publisher has the names that begin with its user's name
and a dot: the broker gives it no others.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar, get_args

import msgspec

from shared.bus.base import Binding, Bus, Exchange, Message, Queue
from shared.errors import QueueDown, QueueSilent, UndecodableMessage
from shared.messages import (
    AdmissionAnswer,
    Command,
    Declare,
    Drain,
    GenerationJob,
    JobClass,
    LimitedTenants,
    QuickJob,
    StopWork,
    is_reply_key,
)

Lane: TypeAlias = (
    JobClass | Literal["quick", "suspect", "resumed", "near", "overflow", "batch-overflow"]
)
"""The queues of a model: interactive and batch generations, quick jobs, jobs in quarantine, which
were running when workers crashed, jobs that have begun and wait for a worker with the same numerics
(a queue for each numerics), jobs whose prefix a worker may have in its cache (a queue for each
worker), and generations of both classes that workers have set aside."""

JOBS = Exchange("warren.jobs", "direct")
SUSPECTS = Exchange("warren.suspects", "direct")
"""A separate exchange, so that only workers have permission to move a job. Workers also announce
themselves to each other over it."""
REPLIES = Exchange("warren.replies", "topic")
CONTROL = Exchange("warren.control", "topic")
USAGE_REPORTS = Exchange("warren.usage", "fanout")
"""A separate exchange, so that workers may write to it and give no commands."""
WORKERS = Exchange("warren.workers", "fanout")
DEAD = Exchange("warren.dead", "fanout")
LEDGER = Exchange("warren.ledger", "fanout")
EXCHANGES = (JOBS, SUSPECTS, REPLIES, CONTROL, USAGE_REPORTS, WORKERS, DEAD, LEDGER)

JOBS_PREFIX = "jobs."
_WORKER = "worker."
"""The beginning of the addresses of workers."""
DEAD_LETTERS = Queue(
    f"{JOBS_PREFIX}dead",
    (Binding(DEAD, ""),),
    kind="quorum",
    max_length=100_000,
    # Each inspection is a delivery, and brokers from 4.0 on drop a message returned 20 times.
    delivery_limit=1_000_000,
)
LEDGER_RECORDS = Queue(
    "ledger.records",
    (Binding(LEDGER, ""),),
    kind="quorum",
    # About 250 MB. Records that do not fit in are reported as lost by their workers.
    max_length=1_000_000,
    # Each restart of a gateway returns the records that it holds.
    delivery_limit=1_000_000,
)
"""Declared by workers and gateways; gateways write its records to their database."""
ALL_GATEWAYS = Binding(CONTROL, "gateways")
USAGE = Binding(USAGE_REPORTS, "")
ANNOUNCEMENTS = Binding(WORKERS, "")
ANNOUNCE_INTERVAL_S = 2.0
"""Seconds between two announcements of a worker, which are its heartbeats. How long others wait for
a worker that is silent is a multiple of it."""
FORGET_AFTER_S = 5 * ANNOUNCE_INTERVAL_S
"""Seconds without an announcement after which a worker counts as gone."""

MAX_PEERS = 32
"""The most other workers that a worker listens to, or about so many."""

_LATER_LOG = re.compile(r"(reply\.[A-Za-z0-9_-]+)--([1-9]\d{0,3})")

JOB_CLASSES: tuple[JobClass, ...] = get_args(JobClass)
OVERFLOW: Mapping[JobClass, Lane] = {"interactive": "overflow", "batch": "batch-overflow"}
"""Where workers set jobs of a class aside, so that jobs of other tenants are not behind them."""
LANES: tuple[Lane, ...] = (*JOB_CLASSES, "quick", "suspect")
"""The lanes that wait for different reasons. What was set aside counts as part of its class."""
DECLARED_LANES: tuple[Lane, ...] = (*LANES, *OVERFLOW.values())
JOBS_MAX_LENGTH = 50_000
JOBS_DELIVERY_LIMIT = 20
_RESUMED_TTL_S = 5.0
"""Seconds after which a job that no worker of its numerics takes returns to the other workers."""
_RESUMED_EXPIRES_S = 24 * 3600.0
_MAX_SILENT_LOOKS = 2
"""How often in a row a broker is silent about a queue before its node counts as down."""
_NEAR_TTL_S = 0.05
"""Seconds after which a job that its worker does not take goes to the other workers. A worker that
is there takes it within a few milliseconds."""
_PROBE_EXPIRES_S = 30.0
_NEAR_EXPIRES_S = 3600.0
"""Deleting the queue loses the jobs that it still has. They wait only while the queue to which they
go is down or full."""
_Job = TypeVar("_Job", bound=GenerationJob | QuickJob)


def overflow_of(lane: Lane) -> Lane | None:
    """Where workers set jobs of this lane aside, if they do."""
    return OVERFLOW[lane] if lane in ("interactive", "batch") else None


def jobs_binding(model: str, lane: Lane) -> Binding:
    """The binding for jobs of a model and lane, except ``resumed`` and ``near``."""
    is_moved = lane == "suspect" or lane in OVERFLOW.values()
    return Binding(SUSPECTS if is_moved else JOBS, f"{model}.{lane}")


def jobs_queue(model: str, lane: Lane) -> Queue:
    binding = jobs_binding(model, lane)
    return Queue(
        f"{JOBS_PREFIX}{binding.routing_key}",
        (binding,),
        kind="quorum",
        max_length=JOBS_MAX_LENGTH,
        delivery_limit=JOBS_DELIVERY_LIMIT,
        dead_letter=Binding(DEAD, ""),
    )


def resumed_queue(model: str, numerics: str) -> Queue:
    """The queue of jobs that began with ``numerics``, for workers that have them."""
    digest = hashlib.blake2s(numerics.encode(), digest_size=4).hexdigest()
    binding = Binding(SUSPECTS, f"{model}.resumed-{digest}")
    return _preferred_queue(model, binding, ttl_s=_RESUMED_TTL_S, expires_s=_RESUMED_EXPIRES_S)


def near_binding(model: str, address: str) -> Binding:
    """The binding for jobs whose prefix the worker with this address may have in its cache."""
    return Binding(JOBS, f"{model}.near-{worker_id_of(address)}")


def near_queue(model: str, address: str) -> Queue:
    """The queue of a worker. A job that the worker does not take at once returns from it to the
    interactive queue."""
    binding = near_binding(model, address)
    return _preferred_queue(model, binding, ttl_s=_NEAR_TTL_S, expires_s=_NEAR_EXPIRES_S)


def _preferred_queue(model: str, binding: Binding, *, ttl_s: float, expires_s: float) -> Queue:
    """A queue of some of the model's workers. A job that none of them takes within ``ttl_s`` goes
    to all workers; the queue is deleted once it was unused for ``expires_s``."""
    return Queue(
        f"{JOBS_PREFIX}{binding.routing_key}",
        (binding,),
        kind="quorum",
        expires_s=expires_s,
        max_length=JOBS_MAX_LENGTH,
        delivery_limit=JOBS_DELIVERY_LIMIT,
        ttl_s=ttl_s,
        dead_letter=jobs_binding(model, "interactive"),
    )


def reply_binding(routing_key: str) -> Binding:
    """The binding for the events of a request; ``routing_key`` is the job's reply_to."""
    return Binding(REPLIES, routing_key)


def reply_key(name: str) -> str:
    """The routing key of the replies to request ``name``."""
    return f"reply.{name}"


def first_log(key: str) -> str:
    """The first log of the request whose log is now ``key``; both are routing key and queue."""
    match = _LATER_LOG.fullmatch(key)
    return key if match is None else match[1]


def later_log(key: str) -> str | None:
    """The log with which the reader of ``key`` replaces it if its node dies; None if ``key`` is
    another publisher's."""
    if key.count(".") > 1:
        return None
    match = _LATER_LOG.fullmatch(key)
    return f"{key}--2" if match is None else f"{match[1]}--{int(match[2]) + 1}"


async def find_later_log(bus: Bus, key: str) -> str | None:
    """The log with which the reader of ``key`` has replaced it, even if its node is down as well;
    None without such a log. Raises `BusUnavailable`."""
    later = later_log(key)
    if later is None:
        return None
    for _ in range(_MAX_SILENT_LOOKS):
        try:
            return later if await bus.inspect(later) is not None else None
        except QueueSilent:  # a broker that elects a leader answers later
            continue
        except QueueDown:
            break
    return later


def reply_queue(name: str, expires_s: float) -> Queue:
    """The log of request ``name``, deleted ``expires_s`` after its last reader disconnected."""
    binding = reply_binding(reply_key(name))
    return Queue(binding.routing_key, (binding,), expires_s=expires_s)


def quick_replies_queue(gateway_id: str) -> Queue:
    """The queue of a gateway for the replies to all its quick jobs."""
    binding = reply_binding(reply_key(f"quick-{gateway_id}"))
    return Queue(binding.routing_key, (binding,), is_exclusive=True)


def copy_queue(name: str) -> Queue:
    """The queue in which a gateway receives a copy of a log that another gateway reads."""
    binding = reply_binding(reply_key(f"copy-{name}"))
    return Queue(binding.routing_key, (binding,), is_exclusive=True)


def worker_address(worker_id: str) -> str:
    return f"{_WORKER}{worker_id}"


def worker_id_of(address: str) -> str:
    """The id of a worker, by its address or its id."""
    return address.removeprefix(_WORKER)


def worker_binding(address: str) -> Binding:
    """The binding for commands to a worker; ``address`` is the address in its `Started`."""
    return Binding(CONTROL, address)


def worker_queue(worker_id: str) -> Queue:
    binding = worker_binding(worker_address(worker_id))
    return Queue(f"control.{binding.routing_key}", (binding,), is_exclusive=True)


def peers_queue(worker_id: str) -> Queue:
    """The queue on which a starting worker receives announcements of running workers."""
    return Queue(f"control.worker.{worker_id}.peers", (ANNOUNCEMENTS,), is_exclusive=True)


def group_binding(model: str, num_groups: int, worker_id: str) -> Binding:
    """The binding for announcements to the group of a worker, if the workers of its model are
    divided into so many groups. ``worker_id`` is hexadecimal."""
    number = int(worker_id, 16) % num_groups
    return Binding(SUSPECTS, f"{model}.peers-{num_groups}-{number}")


def group_queue(model: str, num_groups: int, worker_id: str) -> Queue:
    """The queue on which a worker of a large fleet receives the announcements of its group."""
    binding = group_binding(model, num_groups, worker_id)
    return Queue(f"control.worker.{worker_id}.group", (binding,), is_exclusive=True)


def gateway_queue(gateway_id: str) -> Queue:
    return Queue(f"control.gateway.{gateway_id}", (ALL_GATEWAYS,), is_exclusive=True)


def usage_queue(gateway_id: str) -> Queue:
    """The queue on which a gateway receives reports of what gateways have admitted, and of detached
    jobs that have ended."""
    return Queue(f"control.gateway.{gateway_id}.usage", (USAGE,), is_exclusive=True)


def announcements_queue(gateway_id: str) -> Queue:
    return Queue(f"workers.{gateway_id}", (ANNOUNCEMENTS,), is_exclusive=True)


def publisher_queue(publisher_id: str) -> Queue:
    """The queue on which a publisher of jobs receives announcements; it is named like a reply queue
    because publishers have permission to declare only these. ``publisher_id`` begins with the name
    of the user and a dot."""
    return Queue(f"reply.{publisher_id}.workers", (ANNOUNCEMENTS,), is_exclusive=True)


def probe_queue(gateway_id: str) -> Queue:
    """A queue without readers, bound like the logs, with which a gateway notices that the exchange
    has lost its bindings. It is full with a single message, so that nothing accumulates."""
    log = reply_queue(f"probe-{gateway_id}", _PROBE_EXPIRES_S)
    return replace(log, max_length=1)


def lasting_resources(model: str) -> tuple[Exchange | Queue, ...]:
    """What the broker should have as long as workers of ``model`` live."""
    jobs = (jobs_queue(model, lane) for lane in DECLARED_LANES)
    return (*EXCHANGES, DEAD_LETTERS, LEDGER_RECORDS, *jobs)


async def declare_worker(bus: Bus, model: str, worker_id: str) -> None:
    """Declare everything that a worker of ``model`` needs."""
    await bus.declare(*lasting_resources(model), worker_queue(worker_id))


class Publishers:
    """What the users of a broker may name in the messages that they publish.

    Gateways serve many tenants, so their users are trusted: their messages name any tenant and any
    request. Every other user publishes under its own name. The ids of its requests begin with that
    name and a dot, and so do the names of its reply queues, after ``reply.``. Its jobs run for the
    tenant of that name, and its commands reach no other requests.

    The broker refuses a message that names another user than that of its connection. A message that
    names none could come from anyone.
    """

    def __init__(self, trusted: Iterable[str]) -> None:
        self._trusted = frozenset(trusted)

    def admitted(self, job: _Job, message: Message) -> _Job:
        """The job of a message, with the tenant that it runs for.

        Raises `UndecodableMessage` if the publisher may not name its request or its reply queue.
        """
        if not is_reply_key(message.reply_to):
            raise UndecodableMessage("reply_to is not the key of a reply queue")
        user = message.user_id
        if self.is_trusted(user):
            return job
        if not user:
            raise UndecodableMessage("the message has no user_id")
        if not self.may_name(user, job.request_id):
            raise UndecodableMessage(f"request_id does not begin with {own_name(user)}")
        if not self.may_be_answered(message):
            raise UndecodableMessage(f"reply_to does not begin with {_own_key(user)}")
        own = msgspec.structs.replace(job, tenant=user, key_id="")
        if isinstance(own, GenerationJob):
            # Limits count jobs by their request ids, which executions would share.
            return msgspec.structs.replace(own, execution=0, is_counted=False, hedge=None)
        return own

    def is_trusted(self, user: str) -> bool:
        """Whether ``user`` may name any tenant and any request."""
        return user in self._trusted

    def may_name(self, user: str, request_id: str) -> bool:
        """Whether ``user`` may publish and command this request."""
        return user in self._trusted or (bool(user) and request_id.startswith(own_name(user)))

    def may_command(self, user: str, command: Command) -> bool:
        """Whether ``user`` may give this command. Only trusted users command workers as a whole and
        end or refuse the work of a tenant."""
        if isinstance(command, Drain | StopWork | Declare | LimitedTenants | AdmissionAnswer):
            return user in self._trusted
        return self.may_name(user, command.request_id)

    def may_be_answered(self, message: Message) -> bool:
        """Whether ``reply_to`` is the key of a reply queue that its publisher may name."""
        user, key = message.user_id, message.reply_to
        is_own = user in self._trusted or (bool(user) and key.startswith(_own_key(user)))
        return is_own and is_reply_key(key)


def own_name(user: str, name: str = "") -> str:
    """``name`` in the name space of a user of the broker."""
    return f"{user}.{name}"


def _own_key(user: str) -> str:
    return reply_key(own_name(user))

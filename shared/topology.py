"""Every exchange, queue and routing key, and who declares what.

warren.jobs     direct  <model>.<lane>    -> jobs.<model>.<lane>    declared by workers
warren.suspects direct  <model>.suspect   -> jobs.<model>.suspect   jobs that workers put aside
warren.replies  topic   reply.<id>        -> reply.<id>             declared by who waits for it
warren.control  topic   worker.<id>       -> control.worker.<id>    commands to one worker
                        gateways          -> control.gateway.<id>   commands to all gateways
warren.workers  fanout                    -> workers.<gateway id>   announcements
                                          -> reply.<id>.workers     the same for publishers
warren.dead     fanout                    -> jobs.dead              rejected, expired, deadly
"""

from typing import Literal, TypeAlias, get_args

from shared.bus.base import Binding, Bus, Exchange, Queue
from shared.messages import JobClass

Lane: TypeAlias = JobClass | Literal["quick", "suspect"]
"""Of a model's jobs: the two classes of generations, what does not wait behind these, and what was
running when workers died."""

JOBS = Exchange("warren.jobs", "direct")
SUSPECTS = Exchange("warren.suspects", "direct")
"""Apart from the others, so that workers need no right to publish jobs."""
REPLIES = Exchange("warren.replies", "topic")
CONTROL = Exchange("warren.control", "topic")
WORKERS = Exchange("warren.workers", "fanout")
DEAD = Exchange("warren.dead", "fanout")

JOBS_PREFIX = "jobs."
DEAD_LETTERS = Queue(
    f"{JOBS_PREFIX}dead",
    (Binding(DEAD, ""),),
    kind="quorum",
    max_length=100_000,
    # Each look at it is a delivery, and brokers from 4.0 on drop what came back 20 times.
    delivery_limit=1_000_000,
)
ALL_GATEWAYS = Binding(CONTROL, "gateways")
ANNOUNCEMENTS = Binding(WORKERS, "")

JOB_CLASSES: tuple[JobClass, ...] = get_args(JobClass)
LANES: tuple[Lane, ...] = (*JOB_CLASSES, "quick", "suspect")
JOBS_MAX_LENGTH = 50_000
JOBS_DELIVERY_LIMIT = 20


def jobs_binding(model: str, lane: Lane) -> Binding:
    """Where jobs of one model and lane are published."""
    return Binding(SUSPECTS if lane == "suspect" else JOBS, f"{model}.{lane}")


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


def reply_binding(routing_key: str) -> Binding:
    """Where the events of one request are published; ``routing_key`` is the job's reply_to."""
    return Binding(REPLIES, routing_key)


def reply_key(name: str) -> str:
    """The routing key of the answers to request ``name``."""
    return f"reply.{name}"


def reply_queue(name: str, expires_s: float) -> Queue:
    """The log of request ``name``, kept for ``expires_s`` after its last reader left."""
    binding = reply_binding(reply_key(name))
    return Queue(binding.routing_key, (binding,), expires_s=expires_s)


def quick_replies_queue(gateway_id: str) -> Queue:
    """Where one gateway gets the answers to all its quick jobs."""
    binding = reply_binding(f"reply.quick.{gateway_id}")
    return Queue(binding.routing_key, (binding,), is_exclusive=True)


def worker_binding(address: str) -> Binding:
    """Where commands to one worker are published; ``address`` is what its `Started` says."""
    return Binding(CONTROL, address)


def worker_queue(worker_id: str) -> Queue:
    binding = worker_binding(f"worker.{worker_id}")
    return Queue(f"control.{binding.routing_key}", (binding,), is_exclusive=True)


def peers_queue(worker_id: str) -> Queue:
    """Where a worker that starts hears those that serve already."""
    return Queue(f"control.worker.{worker_id}.peers", (ANNOUNCEMENTS,), is_exclusive=True)


def gateway_queue(gateway_id: str) -> Queue:
    return Queue(f"control.gateway.{gateway_id}", (ALL_GATEWAYS,), is_exclusive=True)


def announcements_queue(gateway_id: str) -> Queue:
    return Queue(f"workers.{gateway_id}", (ANNOUNCEMENTS,), is_exclusive=True)


def publisher_queue(publisher_id: str) -> Queue:
    """Where a program that publishes jobs hears the announcements: publishers may declare no more
    than reply queues."""
    return Queue(f"reply.{publisher_id}.workers", (ANNOUNCEMENTS,), is_exclusive=True)


async def declare_worker(bus: Bus, model: str, worker_id: str) -> None:
    """Everything that a worker of ``model`` needs."""
    jobs = (jobs_queue(model, lane) for lane in LANES)
    await bus.declare(REPLIES, WORKERS, DEAD_LETTERS, *jobs, worker_queue(worker_id))


async def declare_gateway(bus: Bus, gateway_id: str) -> None:
    """Everything that a gateway needs before its first request."""
    await bus.declare(JOBS, REPLIES, gateway_queue(gateway_id), announcements_queue(gateway_id))

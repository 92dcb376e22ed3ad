"""What `/admin/v1/status` says of hedges, audits and requests that were computed once."""

from collections.abc import Iterator, Sequence

from msgspec import Struct
from prometheus_client import Counter

from gateway.log.auditing import AuditFinding
from gateway.wiring import Gateway
from shared.topology import worker_id_of


class ModelRuns(Struct, frozen=True, kw_only=True):
    """The hedges, audits and equal requests of a model at this gateway, since its start."""

    model: str
    num_hedges_won: int = 0
    """Hedges that became the writer."""
    num_hedges_lost: int = 0
    num_hedges_cancelled: int = 0
    num_audits_equal: int = 0
    num_audits_different: int = 0
    """Answers about which two workers disagree."""
    num_audits_skipped: int = 0
    num_exact_hit: int = 0
    """Requests that were answered with an answer that was computed before."""
    num_exact_attached: int = 0
    """Requests that shared the execution of another request."""
    num_exact_miss: int = 0
    """Requests that asked to be computed once, and were the first."""
    num_exact_bypass: int = 0
    """Requests that asked to be computed once, and could not have equals."""


class DisagreementStatus(Struct, frozen=True, kw_only=True):
    """An audit that found a difference."""

    found_at: float
    """Unix time in seconds."""
    request_id: str
    model: str
    worker: str
    """The id of the worker whose answer was sent."""
    other_worker: str
    suspect: str | None
    """The worker with which a third worker disagrees; null if there is none."""
    choice: int
    at_token: int


def runs_by_model(gateway: Gateway) -> list[ModelRuns]:
    """The counts of each model that has any."""
    counts: dict[str, dict[str, int]] = {}
    for kind, outcome, counter in (
        ("hedges", "outcome", gateway.hedging.outcomes),
        ("audits", "outcome", gateway.auditor.outcomes),
        ("exact", "result", gateway.executions.requests),
    ):
        for model, name, value in _values(counter, outcome):
            counts.setdefault(model, {})[f"num_{kind}_{name}"] = value
    return [ModelRuns(model=model, **of_model) for model, of_model in sorted(counts.items())]


def disagreements(gateway: Gateway) -> Sequence[DisagreementStatus]:
    """The newest differences that audits have found, the newest first."""
    return [_disagreement(one) for one in reversed(gateway.auditor.differences)]


def _values(counter: Counter, label: str) -> Iterator[tuple[str, str, int]]:
    """The models, the values of ``label``, and the counts."""
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                yield sample.labels["model"], sample.labels[label], int(sample.value)


def _disagreement(found: AuditFinding) -> DisagreementStatus:
    return DisagreementStatus(
        found_at=found.found_at,
        request_id=found.request_id,
        model=found.model,
        worker=worker_id_of(found.worker),
        other_worker=worker_id_of(found.other_worker),
        suspect=None if found.suspect is None else worker_id_of(found.suspect),
        choice=found.disagreement.choice,
        at_token=found.disagreement.position,
    )

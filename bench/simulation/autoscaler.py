"""KEDA and the HorizontalPodAutoscaler that it makes, with what a ScaledObject says.

KEDA's operator looks every ``pollingInterval`` whether a pool is active: it starts the first
worker, and after ``cooldownPeriod`` without activity stops all if ``minReplicaCount`` is 0. Between
one worker and ``maxReplicaCount`` the HPA decides every 15 seconds. What the manifest does not say
is Kubernetes' and KEDA's default.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

_SYNC_S = 15.0
"""``--horizontal-pod-autoscaler-sync-period``."""
_TOLERANCE = 0.1
"""``--horizontal-pod-autoscaler-tolerance``."""


@dataclass(frozen=True)
class Policy:
    """So much may change within a period."""

    kind: Literal["Pods", "Percent"]
    value: float
    period_s: float


@dataclass(frozen=True)
class Rules:
    """The behaviour of the HPA in one direction."""

    stabilization_s: float
    policies: tuple[Policy, ...]

    def overridden(self, given: Mapping[str, Any]) -> "Rules":
        """With what the manifest says. Raises `ValueError` for what is not simulated."""
        if given.get("selectPolicy", "Max") != "Max" or "tolerance" in given:
            raise ValueError("a selectPolicy other than Max and a tolerance are not simulated")
        policies = tuple(
            Policy(one["type"], one["value"], one["periodSeconds"])
            for one in given.get("policies", ())
        )
        stabilization_s = given.get("stabilizationWindowSeconds", self.stabilization_s)
        return Rules(stabilization_s, policies or self.policies)


_UP = Rules(0.0, (Policy("Percent", 100, 15), Policy("Pods", 4, 15)))
_DOWN = Rules(300.0, (Policy("Percent", 100, 15),))


@dataclass(frozen=True)
class Demand:
    """The gauges in the query of the chart's trigger, summed over classes and workers."""

    warren_queue_jobs_waiting: float
    warren_worker_jobs_waiting: float
    warren_worker_sequences_waiting: float
    warren_worker_sequences_running: float

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ScaledObject:
    """What decides the size of a pool."""

    min_replicas: int
    max_replicas: int
    threshold: float
    """Demand for each worker."""
    activation_threshold: float
    polling_s: float
    cooldown_s: float
    up: Rules
    down: Rules

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "ScaledObject":
        """Read a manifest. Raises `ValueError` for what is not simulated."""
        spec = manifest["spec"]
        (trigger,) = spec["triggers"]
        if trigger["metricType"] != "AverageValue" or "idleReplicaCount" in spec:
            raise ValueError("only triggers of the type AverageValue are simulated")
        config = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {})
        behavior = config.get("behavior", {})
        metadata = trigger["metadata"]
        return cls(
            min_replicas=spec.get("minReplicaCount", 0),
            max_replicas=spec.get("maxReplicaCount", 100),
            threshold=float(metadata["threshold"]),
            activation_threshold=float(metadata.get("activationThreshold", 0)),
            polling_s=spec.get("pollingInterval", 30),
            cooldown_s=spec.get("cooldownPeriod", 300),
            up=_UP.overridden(behavior.get("scaleUp", {})),
            down=_DOWN.overridden(behavior.get("scaleDown", {})),
        )


class Autoscaler:
    """Decides the number of workers from the last scrape of their demand."""

    def __init__(self, scaled: ScaledObject, scrape_s: float) -> None:
        """``scrape_s``: seconds between two scrapes of the gauges."""
        self._scaled = scaled
        self._scrape_s = scrape_s
        self._value = 0.0
        self._next_scrape = self._next_poll = self._next_sync = 0.0
        self._active_at = -math.inf
        self._recommended: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def act(self, now: float, demand: Callable[[], float], current: int) -> int:
        """The number of workers from ``now`` on. Call it at increasing times, at least as often as
        scrapes, polls and syncs are due."""
        if now >= self._next_scrape:
            self._next_scrape += self._scrape_s
            self._value = demand()
        wanted = current
        if now >= self._next_poll:
            self._next_poll += self._scaled.polling_s
            wanted = self._poll(now, wanted)
        if now >= self._next_sync:
            self._next_sync += _SYNC_S
            if wanted:  # the HPA is disabled for an empty pool
                wanted = self._sync(now, wanted)
        return wanted

    def _poll(self, now: float, current: int) -> int:
        """What KEDA's operator does: from nothing to the first worker, and back."""
        scaled = self._scaled
        if self._value > scaled.activation_threshold:
            self._active_at = now
            return current or max(1, scaled.min_replicas)
        is_cool = now - self._active_at > scaled.cooldown_s
        if not scaled.min_replicas and is_cool:
            return 0
        return max(current, scaled.min_replicas)

    def _sync(self, now: float, current: int) -> int:
        """What the HPA does."""
        scaled = self._scaled
        desired = current
        if abs(self._value / (scaled.threshold * current) - 1) > _TOLERANCE:
            desired = math.ceil(self._value / scaled.threshold)
        stable = self._stabilized(now, current, desired)
        if stable > current:
            allowed = max(
                math.ceil(_grown(self._start_of(now, current, policy), policy))
                for policy in scaled.up.policies
            )
            stable = min(stable, max(allowed, current))
        elif stable < current:
            allowed = min(
                math.floor(_shrunk(self._start_of(now, current, policy), policy))
                for policy in scaled.down.policies
            )
            stable = max(stable, min(allowed, current))
        stable = min(max(stable, scaled.min_replicas, 1), scaled.max_replicas)
        if stable != current:
            self._changes.append((now, stable - current))
        return stable

    def _stabilized(self, now: float, current: int, desired: int) -> int:
        """The size that none of the recent recommendations speaks against."""
        if not self._recommended:
            self._recommended.append((now, current))
        up, down = self._scaled.up.stabilization_s, self._scaled.down.stabilization_s
        lowest = min([desired, *_since(now - up, self._recommended)])
        highest = max([desired, *_since(now - down, self._recommended)])
        self._recommended.append((now, desired))
        self._recommended = [one for one in self._recommended if one[0] > now - max(up, down)]
        return min(max(current, lowest), highest)

    def _start_of(self, now: float, current: int, policy: Policy) -> int:
        """The number of workers when a policy's period began."""
        changes = list(_since(now - policy.period_s, self._changes))
        return current - sum(changes)


def _since(begin: float, entries: Iterable[tuple[float, int]]) -> Iterable[int]:
    return (number for at, number in entries if at > begin)


def _grown(start: int, policy: Policy) -> float:
    return start + policy.value if policy.kind == "Pods" else start * (1 + policy.value / 100)


def _shrunk(start: int, policy: Policy) -> float:
    return start - policy.value if policy.kind == "Pods" else start * (1 - policy.value / 100)

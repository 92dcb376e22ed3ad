"""A worker's limits, and the duration of its steps as `bench.engine` has measured them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from shared.settings import GatewaySettings, WorkerSettings
from worker.engine.step_cost import StepCost, StepWork

MEASURED = Path(__file__).parents[1] / "results" / "engine.json"
_NUM_PASSES = 200
"""Passes over the measured steps, after which the fit does not change any more."""


class Prices(NamedTuple):
    """What a step costs, in seconds: the terms of `worker.engine.step_cost`."""

    step: float
    prompt_token: float
    prompt_pair: float
    decode: float
    decode_pair: float

    @classmethod
    def measured(cls, weights: str, path: Path = MEASURED) -> Self:
        """The engine's own cost model, fitted to the steps in a file of `bench.engine`. Raises
        `ValueError` if it has none with these weights."""
        steps = [row for row in json.loads(path.read_text())["steps"] if row["weights"] == weights]
        if not steps:
            raise ValueError(f"{path.name} has no steps with weights in {weights}")
        cost = StepCost()
        for _ in range(_NUM_PASSES):
            for row in steps:
                work = StepWork()
                for _ in range(row["num_seqs"]):
                    work.add(row["context"], row["num_new_tokens"])
                cost.learn(work, row["step_ms"] / 1e3)
        step = cost.seconds(StepWork())
        return cls(
            step=step,
            prompt_token=cost.seconds(StepWork(num_prompt_tokens=1)) - step,
            prompt_pair=cost.seconds(StepWork(num_prompt_pairs=1)) - step,
            decode=cost.seconds(StepWork(num_decodes=1)) - step,
            decode_pair=cost.seconds(StepWork(num_decode_pairs=1)) - step,
        )

    def seconds(self, work: StepWork) -> float:
        """The duration of a step."""
        return (
            self.step
            + self.prompt_token * work.num_prompt_tokens
            + self.prompt_pair * work.num_prompt_pairs
            + self.decode * work.num_decodes
            + self.decode_pair * work.num_decode_pairs
        )


def _default(name: str, of: type[GatewaySettings | WorkerSettings]) -> float:
    default: float = of.model_fields[name].default
    return default


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The settings of gateways and workers that matter here. Their defaults are the product's."""

    prices: Prices
    max_num_seqs: int = int(_default("max_num_seqs", WorkerSettings))
    max_num_batched_tokens: int = int(_default("max_num_batched_tokens", WorkerSettings))
    max_waiting_jobs: int = int(_default("max_waiting_jobs", WorkerSettings))
    max_step_s: float = _default("max_step_ms", WorkerSettings) / 1e3
    announce_interval_s: float = _default("announce_interval_s", WorkerSettings)
    drain_grace_s: float = _default("drain_grace_s", WorkerSettings)
    num_blocks: int = 0
    """Blocks of a worker's cache, each for 16 tokens; 0: as many as any requests need, and no
    prefix cache."""
    has_affinity: bool = bool(_default("affinity", GatewaySettings))
    start_s: float = 60.0
    """From the creation of a worker's pod to its first job."""
    max_queue_wait_s: float = _default("max_queue_wait_s", GatewaySettings)
    request_timeout_s: float = _default("request_timeout_s", GatewaySettings)

"""Writes the recording rules with vLLM's names: ``python -m infra.vllm_names``.

Colons in the names of metrics are for recording rules, so Prometheus records these names and no
process exports them. Dashboards for vLLM work with them.
"""

from collections.abc import Iterator
from pathlib import Path

from shared.telemetry.metrics import Description
from worker.engine.interface import EngineLoad
from worker.engine.step_times import StepTimes
from worker.jobs.metrics import JobMetrics
from worker.process.metrics import WorkerMetrics

_INFRA = Path(__file__).parent
FILES = (_INFRA / "prometheus/vllm.rules.yml", _INFRA / "helm/warren/files/vllm.rules.yml")
"""For compose, and for the chart, which can only read files of its own."""
_HEAD = """\
# vLLM's names for Warren's metrics. Written by infra/vllm_names.py.
groups:
  - name: vllm-names
    rules:
"""
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


def worker_descriptions() -> list[Description]:
    """Everything that a worker exports, except for what all processes do."""
    jobs = JobMetrics("", 0)
    load = EngineLoad(0, 0, 1, 1, 0)
    worker = WorkerMetrics(
        jobs, lambda: load, StepTimes(), stalled_s=lambda: 0.0, limits={"max_num_seqs": 1}
    )
    return [*jobs.catalog.descriptions, *worker.catalog.descriptions]


def _rules(described: Description) -> Iterator[str]:
    vllm = described.vllm + ("_total" if described.kind == "counter" else "")
    for suffix in _SUFFIXES.get(described.kind, ("",)):
        yield f"""\
      - record: vllm:{vllm}{suffix}
        expr: >-
          label_replace(
          sum without (class, source, tenant) ({described.name}{suffix}),
          "model_name", "$1", "model", "(.*)")
"""


_SUCCESS = """\
      - record: vllm:request_success_total
        expr: >-
          label_replace(label_replace(
          warren_gateway_choices_finished_total,
          "model_name", "$1", "model", "(.*)"), "finished_reason", "$1", "reason", "(.*)")
"""


def rendered() -> str:
    """The text of the file."""
    rules = [rule for one in worker_descriptions() if one.vllm for rule in _rules(one)]
    return "".join([_HEAD, *rules, _SUCCESS])


if __name__ == "__main__":
    for path in FILES:
        path.write_text(rendered())

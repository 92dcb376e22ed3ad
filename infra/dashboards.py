"""Writes the Grafana dashboards: ``python -m infra.dashboards``.

A test evaluates every expression in a real Prometheus that scraped a real deployment.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INFRA = Path(__file__).parent
DIRECTORIES = (_INFRA / "grafana/dashboards", _INFRA / "helm/warren/files/dashboards")
"""For compose, and for the chart, which can only read files of its own."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WARREN = '{job=~"gateway|worker"}'
"""Selects Warren's own processes for metrics whose names are not Warren's."""
_WIDTH, _HEIGHT = 8, 8
_COLUMNS = 24


@dataclass(frozen=True, slots=True)
class Panel:
    """A time series panel."""

    title: str
    meaning: str
    unit: str
    series: Sequence[tuple[str, str]]
    """Expressions and their legends."""


def _quantiles(metric: str, by: str, quantiles: Iterable[float] = (0.5, 0.95, 0.99)) -> Any:
    return [
        (
            f"histogram_quantile({q}, sum by ({by}, le) "
            f'(rate({metric}_bucket{{model=~"$model"}}[$__rate_interval])))',
            f"p{round(q * 100)} " + " ".join(f"{{{{{label}}}}}" for label in by.split(", ")),
        )
        for q in quantiles
    ]


def _rate(metric: str, by: str, more: str = "") -> tuple[str, str]:
    labels = ", ".join(part for part in ('model=~"$model"', more) if part)
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))", legend


def _max(metric: str, by: str) -> tuple[str, str]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return f'max by ({by}) ({metric}{{model=~"$model"}})', legend


def _sum(metric: str, by: str) -> tuple[str, str]:
    return _max(metric, by)[0].replace("max by", "sum by", 1), _max(metric, by)[1]


SERVICE = (
    Panel(
        "Requests",
        "Accepted requests that ended, by class and outcome.",
        "reqps",
        [_rate("warren_gateway_requests_total", "class, outcome")],
    ),
    Panel(
        "Refused requests",
        "Requests that were not accepted, by reason.",
        "reqps",
        [
            (
                "sum by (reason) (rate(warren_gateway_requests_refused_total[$__rate_interval]))",
                "{{reason}}",
            )
        ],
    ),
    Panel(
        "Errors answered",
        "Errors before and in streams, by code.",
        "reqps",
        [("sum by (code) (rate(warren_gateway_errors_total[$__rate_interval]))", "{{code}}")],
    ),
    Panel(
        "Time to first token",
        "As clients of the gateways see it.",
        "s",
        _quantiles("warren_gateway_time_to_first_token_seconds", "model, class"),
    ),
    Panel(
        "Inter-token latency",
        "Time between two tokens of a choice.",
        "s",
        _quantiles("warren_gateway_inter_token_latency_seconds", "model, class"),
    ),
    Panel(
        "Request duration",
        "From the arrival of a request to the end of its answer.",
        "s",
        _quantiles("warren_gateway_request_duration_seconds", "model, class"),
    ),
    Panel(
        "Tokens",
        "Tokens passed on to clients, and prompt tokens.",
        "short",
        [
            (_rate("warren_gateway_completion_tokens_total", "model")[0], "completion {{model}}"),
            (_rate("warren_gateway_prompt_tokens_total", "model")[0], "prompt {{model}}"),
        ],
    ),
    Panel(
        "Requests in progress",
        "Requests that wait for a worker and that are being answered.",
        "short",
        [
            (
                _sum("warren_gateway_requests_waiting", "model, class")[0],
                "waiting {{model}} {{class}}",
            ),
            (
                _sum("warren_gateway_requests_running", "model, class")[0],
                "running {{model}} {{class}}",
            ),
        ],
    ),
    Panel(
        "Take-overs",
        "Streams that moved to another worker, by reason.",
        "short",
        [
            (
                'sum by (reason) (increase(warren_gateway_takeovers_total{model=~"$model"}[5m]))',
                "{{reason}}",
            )
        ],
    ),
    Panel(
        "Live workers",
        "Workers with a recent heartbeat.",
        "short",
        [_max("warren_fleet_workers", "model")],
    ),
    Panel(
        "Use of the gateways' limits",
        "Requests in flight, as a share of max_requests.",
        "percentunit",
        [
            (
                "warren_gateway_requests_in_flight / on (instance) "
                'warren_gateway_limit{limit="max_requests"}',
                "{{instance}}",
            )
        ],
    ),
    Panel(
        "Broker",
        "Whether each gateway is connected to the broker, and connections opened again.",
        "short",
        [
            ("warren_gateway_broker_connected", "connected {{instance}}"),
            (
                "sum by (instance) (increase(warren_broker_reconnects_total[5m]))",
                "reconnects {{instance}}",
            ),
        ],
    ),
)

WORKER = (
    Panel(
        "Sequences",
        "Running, waiting in the worker, and free slots.",
        "short",
        [
            (_sum("warren_worker_sequences_running", "instance")[0], "running {{instance}}"),
            (_sum("warren_worker_sequences_waiting", "instance")[0], "waiting {{instance}}"),
            (
                'warren_worker_sequences_free{model=~"$model", class="interactive"}',
                "free {{instance}}",
            ),
        ],
    ),
    Panel(
        "KV cache",
        "Used share of the KV cache's blocks.",
        "percentunit",
        [_max("warren_worker_kv_cache_usage_ratio", "instance")],
    ),
    Panel(
        "Blocks of the KV cache",
        "Blocks by content: tokens, recurrent states, and what can be evicted of both.",
        "short",
        [_sum("warren_worker_kv_cache_blocks", "content")],
    ),
    Panel(
        "Generated tokens",
        "Tokens generated each second.",
        "short",
        [_rate("warren_worker_generation_tokens_total", "instance")],
    ),
    Panel(
        "Step duration",
        "Duration of the engine's steps.",
        "s",
        _quantiles("warren_worker_step_duration_seconds", "instance", (0.5, 0.99)),
    ),
    Panel(
        "Time to first token",
        "From the beginning of a job at the worker.",
        "s",
        _quantiles("warren_worker_time_to_first_token_seconds", "class", (0.5, 0.95)),
    ),
    Panel(
        "Prefill and decode",
        "The 95th percentile of both phases of a job.",
        "s",
        [
            (
                _quantiles("warren_worker_prefill_time_seconds", "class", [0.95])[0][0],
                "prefill {{class}}",
            ),
            (
                _quantiles("warren_worker_decode_time_seconds", "class", [0.95])[0][0],
                "decode {{class}}",
            ),
        ],
    ),
    Panel(
        "Jobs",
        "Runs that ended, by outcome.",
        "short",
        [_rate("warren_worker_jobs_total", "outcome")],
    ),
    Panel(
        "Prefix cache hits",
        "Share of prompt tokens that were found in the prefix cache.",
        "percentunit",
        [
            (
                _rate("warren_worker_prefix_cache_hits_total", "instance")[0]
                + " / "
                + _rate("warren_worker_prefix_cache_queries_total", "instance")[0],
                "{{instance}}",
            )
        ],
    ),
    Panel(
        "Preemptions",
        "Sequences that lost their blocks and are computed again.",
        "short",
        [_rate("warren_worker_preemptions_total", "instance")],
    ),
    Panel(
        "Take-overs and dead letters",
        "Jobs continued from another run, and jobs given up.",
        "short",
        [
            (
                'sum by (reason) (increase(warren_worker_takeovers_total{model=~"$model"}[5m]))',
                "taken over, {{reason}}",
            ),
            (
                'sum by (reason) (increase(warren_worker_dead_letters_total{model=~"$model"}[5m]))',
                "dead, {{reason}}",
            ),
        ],
    ),
    Panel(
        "Stalled",
        "Seconds without a completed step while there is work.",
        "s",
        [_max("warren_worker_stalled_seconds", "instance")],
    ),
    Panel(
        "CPU and memory",
        "Cores in use and resident memory of each gateway and each worker.",
        "short",
        [
            (
                f"rate(process_cpu_seconds_total{_WARREN}[$__rate_interval])",
                "cores {{job}} {{instance}}",
            ),
            (f"process_resident_memory_bytes{_WARREN} / 1e9", "GB {{job}} {{instance}}"),
        ],
    ),
)

QUEUE = (
    Panel(
        "Waiting jobs",
        "Jobs at the broker, of all publishers.",
        "short",
        [_max("warren_queue_jobs_waiting", "model, class")],
    ),
    Panel(
        "Age of the oldest job",
        "Estimated from above.",
        "s",
        [_max("warren_queue_oldest_age_seconds", "model, class")],
    ),
    Panel(
        "Waiting tokens",
        "Estimated from recent jobs.",
        "short",
        [_max("warren_queue_tokens_waiting", "model, class")],
    ),
    Panel(
        "Queue time",
        "From the creation of a job to its arrival at a worker.",
        "s",
        _quantiles("warren_worker_queue_time_seconds", "class"),
    ),
    Panel(
        "Free and running sequences",
        "Of all live workers.",
        "short",
        [
            (
                _max(f"warren_fleet_sequences_{kind}", "model, class")[0],
                f"{kind} {{{{model}}}} {{{{class}}}}",
            )
            for kind in ("free", "running")
        ],
    ),
    Panel(
        "Consumers",
        "Workers that consume each queue.",
        "short",
        [_max("warren_queue_consumers", "model, class")],
    ),
    Panel(
        "Dead letters",
        "Messages in the queue of dead letters.",
        "short",
        [("max(warren_queue_dead_letters)", "dead letters")],
    ),
    Panel(
        "Incidents",
        "Failures that processes survived, by what failed.",
        "short",
        [("sum by (job, kind) (increase(warren_incidents_total[5m]))", "{{job}} {{kind}}")],
    ),
    Panel(
        "Reconnects",
        "Connections to the broker that were opened again.",
        "short",
        [("sum by (job) (increase(warren_broker_reconnects_total[5m]))", "{{job}}")],
    ),
)

TENANTS = (
    Panel(
        "Requests by tenant",
        "Accepted requests that ended.",
        "reqps",
        [_rate("warren_gateway_requests_total", "tenant")],
    ),
    Panel(
        "Completion tokens by tenant",
        "Tokens passed on to clients.",
        "short",
        [_rate("warren_gateway_completion_tokens_total", "tenant")],
    ),
    Panel(
        "Prompt tokens by tenant",
        "Prompt tokens of requests.",
        "short",
        [_rate("warren_gateway_prompt_tokens_total", "tenant")],
    ),
    Panel(
        "Share of the generated tokens",
        "Of all publishers, over HTTP and AMQP.",
        "percentunit",
        [
            (
                _rate("warren_worker_generation_tokens_total", "tenant")[0]
                + " / ignoring (tenant) group_left "
                + 'sum(rate(warren_worker_generation_tokens_total{model=~"$model"}'
                "[$__rate_interval]))",
                "{{tenant}}",
            )
        ],
    ),
    Panel(
        "Unsuccessful requests by tenant",
        "Accepted requests with another outcome than completed, as a share of all.",
        "percentunit",
        [
            (
                "1 - "
                + _rate("warren_gateway_requests_total", "tenant", 'outcome="completed"')[0]
                + " / "
                + _rate("warren_gateway_requests_total", "tenant")[0],
                "{{tenant}}",
            )
        ],
    ),
    Panel(
        "Cached prompt tokens by tenant",
        "Share of prompt tokens that were found in the prefix cache.",
        "percentunit",
        [
            (
                _rate("warren_gateway_cached_tokens_total", "tenant")[0]
                + " / "
                + _rate("warren_gateway_prompt_tokens_total", "tenant")[0],
                "{{tenant}}",
            )
        ],
    ),
    Panel(
        "Jobs by tenant and class",
        "Runs that ended on workers.",
        "short",
        [_rate("warren_worker_jobs_total", "tenant, class")],
    ),
)

DASHBOARDS = {"service": SERVICE, "worker": WORKER, "queue": QUEUE, "tenants": TENANTS}


def expressions() -> list[str]:
    """The expressions of all dashboards, without Grafana's variables."""
    return [
        expression.replace("$__rate_interval", "1m").replace("$model", ".*")
        for panels in DASHBOARDS.values()
        for panel in panels
        for expression, _ in panel.series
    ]


def dashboard(name: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    return {
        "uid": f"warren-{name}",
        "title": f"Warren: {name}",
        "tags": ["warren"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "links": [{"title": "Warren", "type": "dashboards", "tags": ["warren"], "keepTime": True}],
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _variables() -> list[dict[str, Any]]:
    query = "label_values(warren_fleet_workers, model)"
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"},
        {
            "name": "model",
            "type": "query",
            "label": "Model",
            "datasource": _SOURCE,
            "definition": query,
            "query": {"query": query, "refId": "model"},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    column, row = number * _WIDTH % _COLUMNS, number * _WIDTH // _COLUMNS
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "gridPos": {"x": column, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for index, (expression, legend) in enumerate(panel.series)
        ],
    }


def rendered() -> dict[Path, str]:
    """The text of each file."""
    return {
        directory / f"{name}.json": json.dumps(dashboard(name, panels), indent=2) + "\n"
        for name, panels in DASHBOARDS.items()
        for directory in DIRECTORIES
    }


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text)

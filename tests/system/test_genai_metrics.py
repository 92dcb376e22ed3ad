"""OpenTelemetry's metrics of generative AI, as a real gateway sends them to a receiver of OTLP."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import httpx
import pytest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics as metrics
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE

from tests.support import PATIENCE_S
from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import NO_TLS
from tests.support.gateway.http import events
from tests.support.otlp import serving

pytestmark = pytest.mark.rabbit

NUM_TOKENS = 20
FIRST_TOKEN_S = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10
]  # fmt: skip
TOKEN_S = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
REQUEST_S = [
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92
]  # fmt: skip
NUMS_OF_TOKENS = [
    1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864
]  # fmt: skip
"""The buckets that the conventions ask for."""
EXPECTED = {
    metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: ("s", FIRST_TOKEN_S),
    metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: ("s", TOKEN_S),
    metrics.GEN_AI_SERVER_REQUEST_DURATION: ("s", REQUEST_S),
    metrics.GEN_AI_CLIENT_TOKEN_USAGE: ("{token}", NUMS_OF_TOKENS),
}
"""Units and buckets by name."""


OF_ALL = {
    names.GEN_AI_PROVIDER_NAME: "warren",
    names.GEN_AI_REQUEST_MODEL: "echo",
    names.GEN_AI_RESPONSE_MODEL: "echo",
}
CHAT = OF_ALL | {names.GEN_AI_OPERATION_NAME: "chat"}
COMPLETION = OF_ALL | {names.GEN_AI_OPERATION_NAME: "text_completion"}
FAILED = COMPLETION | {ERROR_TYPE: "deadline_exceeded"}


class Run(NamedTuple):
    """What a gateway exported of a streamed chat, a completion, and a streamed completion that
    failed."""

    resource: dict[str, str]
    metrics: dict[str, Metric]
    usage: Mapping[str, int]
    """That of the completion."""
    num_tokens_cut_off: int
    """The tokens of the completion that failed."""

    def points(self, name: str) -> list[tuple[dict[str, str], int, float]]:
        """Attributes, count and sum of each series."""
        points = self.metrics[name].histogram.data_points
        return [(strings(point.attributes), point.count, point.sum) for point in points]


def strings(attributes: Iterable[KeyValue]) -> dict[str, str]:
    return {one.key: one.value.string_value for one in attributes}


def complete(url: str, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    body = {"model": "echo", "max_tokens": NUM_TOKENS, "ignore_eos": True, **more}
    return httpx.post(f"{url}{path}", json=body, timeout=PATIENCE_S, verify=NO_TLS)


def num_tokens_cut_off(url: str) -> int:
    """The tokens of a completion until its deadline, which on a busy machine may be none."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    more: dict[str, Any] = {
        "max_tokens": 2000,
        "timeout": 3,  # in which it starts
        "stream": True,
        "stream_options": usage,
    }
    late = complete(url, prompt="Hello", **more)
    *chunks, end = events(late.text) if late.status_code == 200 else [late.json()]
    assert end["error"]["code"] == FAILED[ERROR_TYPE], late.text
    return max((chunk["usage"]["completion_tokens"] for chunk in chunks), default=0)


@pytest.fixture(scope="module")
def run(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Run:
    logs = tmp_path_factory.mktemp("genai")
    with serving() as collector:
        options = (f"--otlp-endpoint={collector.url}",)
        with (
            processes.echo_worker(broker.url_of("worker"), logs / "worker", "--step-ms=5"),
            processes.gateway(broker.url_of("gateway"), logs / "gateway", *options) as gateway,
        ):
            answer = complete(gateway.url, prompt="Hello").json()
            messages = [{"role": "user", "content": "Hello"}]
            complete(gateway.url, "/v1/chat/completions", messages=messages, stream=True)
            num_cut_off = num_tokens_cut_off(gateway.url)
        last = collector.metrics[-1]  # the counts are cumulative
    exported = [metric for scope in last.scope_metrics for metric in scope.metrics]
    by_name = {one.name: one for one in exported if one.name.startswith("gen_ai.")}
    return Run(strings(last.resource.attributes), by_name, answer["usage"], num_cut_off)


def test_metrics_have_the_names_units_and_buckets_of_the_conventions(run: Run) -> None:
    assert {
        name: (metric.unit, list(metric.histogram.data_points[0].explicit_bounds))
        for name, metric in run.metrics.items()
    } == EXPECTED
    assert run.resource["service.name"] == "warren-gateway"


@pytest.mark.parametrize(
    "name",
    [metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN, metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN],
)
def test_times_of_tokens_are_those_of_answers_without_an_error(run: Run, name: str) -> None:
    points = run.points(name)

    assert [(attributes, count) for attributes, count, _ in points] == [(COMPLETION, 1), (CHAT, 1)]
    assert all(0 < seconds < PATIENCE_S for _, _, seconds in points)


def test_durations_of_requests_name_their_errors(run: Run) -> None:
    points = run.points(metrics.GEN_AI_SERVER_REQUEST_DURATION)

    assert [(attributes, count) for attributes, count, _ in points] == [
        (COMPLETION, 1),
        (CHAT, 1),
        (FAILED, 1),
    ]
    assert all(0 < seconds < PATIENCE_S for _, _, seconds in points)


def test_tokens_are_those_of_the_usage(run: Run) -> None:
    counts, sums = {}, {}
    for attributes, count, tokens in run.points(metrics.GEN_AI_CLIENT_TOKEN_USAGE):
        operation = attributes[names.GEN_AI_OPERATION_NAME]
        key = f"{operation} {attributes[names.GEN_AI_TOKEN_TYPE]}"
        counts[key], sums[key] = count, tokens

    # The completion that failed is counted, too, with the tokens that there were.
    assert counts == {
        "text_completion input": 2,
        "text_completion output": 2,
        "chat input": 1,
        "chat output": 1,
    }
    assert sums["text_completion input"] == 2 * run.usage["prompt_tokens"]
    assert sums["text_completion output"] == NUM_TOKENS + run.num_tokens_cut_off
    assert sums["chat output"] == run.usage["completion_tokens"] == NUM_TOKENS

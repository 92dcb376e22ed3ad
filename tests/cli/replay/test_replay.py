"""``warren replay``, with a gateway in a thread and workers of two models."""

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cli.batch.over_http import run_over_http
from cli.gateway_client import connect, request_json
from gateway.intake.keys.key_file import KeyFile
from shared.bus.base import Bus
from shared.messages import Logprob, TokenLogprobs
from tests.support.deployment.command import Ended, warren
from tests.support.gateway.batches import chat
from tests.support.gateway.http import LiveGateway, eventually
from tests.support.gateway.serving import served
from tests.support.workers.batch_files import write_lines
from tests.support.workers.scripted_worker import MODEL, ScriptedJob, ScriptedWorker, words

OTHER = "scripted-q4"
FINGERPRINT = "b4c2a5088578ae95f6083227d7849976"
"""That of the other model."""
CHANGED: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "old": ("new", {"new": -0.25, "old": -1.75}),
    "stale": ("fresh", {"fresh": -0.1, "ripe": -3.0}),
}
"""What the other model says in place of a word, and the logprobs of its likeliest words there."""


async def rephrase(job: ScriptedJob) -> None:
    """Send each word of the prompt, or what the other model says in its place."""
    await job.start()
    said = words(job.job.prompts[0])
    if "refused" in said:
        return await job.fail("invalid_request", "This model cannot answer that.")
    assert job.lane == "batch"
    for word in said:
        text, likeliest = CHANGED.get(word, (word, {word: 0.0}))
        await job.publish(job.log.delta(0, [1], f"{text} ", logprobs=[_told(text, likeliest)]))
    return await job.finish()


def _told(text: str, likeliest: Mapping[str, float]) -> TokenLogprobs:
    top = [Logprob(1, logprob, f"{word} ".encode()) for word, logprob in likeliest.items()]
    return TokenLogprobs(Logprob(1, likeliest[text], f"{text} ".encode()), tuple(top))


async def repeat(job: ScriptedJob) -> None:
    await job.start()
    for word in words(job.job.prompts[0]):
        await job.say(f"{word} ")
    await job.finish()


def completion(custom_id: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


CHATS = [
    chat("equal", "one two three", temperature=0),
    chat("seeded", "one two three", seed=7, receipt=False, timeout=3000),
    chat("parts", "one old three", temperature=0),
    chat("parts far", "one two stale", temperature=0, logprobs=True),
    chat("sampled", "one two three"),
    chat("refused", "refused", temperature=0),
    chat("seeded differently", "old", seed=8),
]
COMPLETIONS = [
    completion("equal", "one two three", temperature=0),
    completion("parts", "one two three old", temperature=0),
]
EMBEDDINGS = [
    {
        "custom_id": "vector",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": MODEL, "input": "one"},
    }
]
BATCHES: Sequence[Sequence[dict[str, Any]]] = [CHATS, COMPLETIONS, EMBEDDINGS]
RESPONSES: Sequence[dict[str, Any]] = [
    {"input": "one two", "temperature": 0, "instructions": "Repeat."},
    {"input": "one old", "temperature": 0, "max_output_tokens": 50},
    {"input": "one two"},
]


@asynccontextmanager
async def another_model(bus: Bus, gateway: LiveGateway, name: str = OTHER) -> AsyncIterator[None]:
    """A worker of the other model, which the gateway has heard of."""

    async def is_served() -> bool:
        listed = await gateway.http.get("/v1/models")
        return (name, FINGERPRINT) in {
            (model["id"], model["fingerprint"]) for model in listed.json()["data"]
        }

    async with ScriptedWorker(bus, rephrase, name) as worker:
        worker.announcement = structs.replace(worker.announcement, fingerprint=FINGERPRINT)
        await eventually(is_served)
        yield


def store(
    url: str,
    directory: Path,
    batches: Iterable[Sequence[dict[str, Any]]],
    responses: Iterable[dict[str, Any]] = (),
    *,
    key: str | None = None,
) -> None:
    """Have batches with these lines answered, and responses, each of which continues the response
    before."""
    with connect(url, key) as client:
        for place, lines in enumerate(batches):
            source = write_lines(directory / f"{place}.jsonl", *lines)
            summary = run_over_http(source, directory / f"{place}.answers", client)
            assert summary.num_failed == 0
        before: dict[str, str] = {}
        for body in responses:
            asked = {"model": MODEL, **body, **before}
            response = request_json(client, "POST", "/v1/responses", json=asked)
            before = {"previous_response_id": response["id"]}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(another_model, script=repeat) as url:
        store(url, tmp_path_factory.mktemp("stored"), BATCHES, RESPONSES)
        yield url


def replay(url: str, *more: str) -> Ended:
    return warren("replay", "--url", url, "--to", OTHER, "--share", "1", *more)


def test_a_replay_says_how_many_answers_are_equal_and_where_the_others_part(url: str) -> None:
    found = json.loads(replay(url, "--json").stdout)

    chats = found["kinds"]["/v1/chat/completions"]
    parted = {one["id"].partition("/")[2]: one for one in chats["differences"]}
    places = {name: (one["char"], one["token"]) for name, one in parted.items()}
    margins = {name: (one["margin"], one["is_at_least"]) for name, one in parted.items()}
    assert (chats["drawn"], chats["compared"], chats["equal"]) == (7, 5, 2)
    assert places == {"parts": (4, 1), "parts far": (8, 2), "seeded differently": (0, 0)}
    assert margins == {
        "parts": (1.5, False),
        "parts far": (pytest.approx(2.9), True),
        "seeded differently": (None, False),
    }
    assert parted["parts"]["stored"] == "old three "
    assert (chats["median_token"], chats["median_margin"]) == (1, 1.5)


def test_each_kind_of_request_is_counted_alone_and_with_the_others(url: str) -> None:
    found = json.loads(replay(url, "--json").stdout)

    completions, embeddings = (
        found["kinds"][f"/v1/{name}"] for name in ("completions", "embeddings")
    )
    (difference,) = completions["differences"]
    assert (difference["char"], difference["token"], difference["margin"]) == (14, 3, 1.5)
    assert completions["share_equal"] == 0.5
    assert (embeddings["compared"], embeddings["share_equal"]) == (0, None)
    assert found["total"]["not_comparable"] == {
        "answers without a text": 1,
        "neither greedy nor seeded": 2,
    }
    assert found["total"]["equal"] == 4


def test_what_the_model_refuses_is_named_and_does_not_stop_the_others(url: str) -> None:
    found = json.loads(replay(url, "--json").stdout)

    (failure,) = found["total"]["failures"]
    assert failure["id"].endswith("/refused")
    assert failure["reason"] == "This model cannot answer that."


def test_the_table_has_a_row_for_each_kind_and_the_reasons_of_what_is_missing(url: str) -> None:
    shown = replay(url)

    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["/v1/chat/completions", "7", "5", "2", "40.0", "1", "4", "1.500"] in rows
    assert ["/v1/embeddings", "1", "0", "0", "-", "-", "-", "-"] in rows
    assert ["all", "13", "9", "4", "44.4", "1", "4", "1.500"] in rows
    assert "2 requests not comparable: neither greedy nor seeded" in shown.stdout
    assert "/refused: This model cannot answer that." in shown.stdout


def test_the_exit_status_is_0_if_all_answers_are_equal(url: str) -> None:
    again = warren("replay", "--url", url, "--to", MODEL, "--share", "1", "--json")

    found = json.loads(again.stdout)["total"]
    assert (again.returncode, found["equal"], found["share_equal"]) == (0, 10, 1.0)


@pytest.mark.parametrize(("least", "status"), [("0.5", 0), ("0.51", 1)])
def test_the_exit_status_says_whether_enough_answers_are_equal(
    least: str, status: int, tmp_path: Path
) -> None:
    with served(another_model, script=repeat) as url:
        store(url, tmp_path, [COMPLETIONS])

        ended = replay(url, "--min-equal", least)

    assert ended.returncode == status


def test_a_request_without_a_new_answer_sets_the_exit_status(url: str) -> None:
    assert replay(url, "--min-equal", "0").returncode == 1


@pytest.mark.parametrize("to", [FINGERPRINT, FINGERPRINT[:8]])
def test_a_model_is_named_by_its_fingerprint_or_the_beginning(url: str, to: str) -> None:
    found = json.loads(replay(url, "--json", "--to", to).stdout)

    assert (found["model"], found["total"]["equal"]) == (OTHER, 4)


def test_a_fingerprint_of_several_models_is_refused(tmp_path: Path) -> None:
    @asynccontextmanager
    async def twins(bus: Bus, gateway: LiveGateway) -> AsyncIterator[None]:
        async with another_model(bus, gateway), another_model(bus, gateway, "scripted-twin"):
            yield

    with served(twins, script=repeat) as url:
        ended = replay(url, "--to", FINGERPRINT)

    assert ended.returncode == 2
    error = f"--to: {FINGERPRINT} is the fingerprint of several models: {OTHER}, scripted-twin"
    assert error in ended.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--share", "0"], "--share: 0.0 is not a share above 0 and up to 1"),
        (["--share", "nan"], "--share: nan is not a share above 0 and up to 1"),
        (["--min-equal", "2"], "--min-equal: 2.0 is not a share from 0 to 1"),
        (["--since", "yesterday"], "--since: yesterday is not a duration such as 90m, 24h or 7d"),
        (["--to", "unknown"], "--to: no live worker serves unknown"),
        (["--to", "unknown"], f"; these have one: {MODEL}, {OTHER}"),
        (["--to", FINGERPRINT[:7]], f"--to: no live worker serves {FINGERPRINT[:7]}"),
    ],
)
def test_bad_input_is_named(url: str, options: list[str], error: str) -> None:
    ended = replay(url, *options)

    assert ended.returncode == 2
    assert error in ended.stderr


def test_a_draw_without_requests_is_an_error(url: str) -> None:
    ended = replay(url, "--share", "1e-18")

    assert ended.returncode == 1
    assert "no request was drawn" in ended.stderr


def test_a_key_replays_what_its_tenant_has_stored(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    owner = keys.add("acme", scopes=("generate", "operator"))
    other = keys.add("globex")
    with served(another_model, script=repeat, key=owner, keys_file=str(keys.path)) as url:
        lines = [completion("equal", "one two", temperature=0)]
        store(url, tmp_path, [lines], key=owner)

        own = replay(url, "--api-key", owner)
        foreign = replay(url, "--api-key", other)

    assert own.returncode == 0, own
    assert foreign.returncode == 1
    assert "no request was drawn" in foreign.stderr


def test_stored_responses_are_replayed_with_all_that_they_continue(url: str) -> None:
    found = json.loads(replay(url, "--json").stdout)["kinds"]["/v1/responses"]

    (difference,) = found["differences"]
    assert (found["drawn"], found["compared"], found["equal"]) == (3, 2, 1)
    assert (difference["char"], difference["token"], difference["margin"]) == (4, 1, 1.5)
    assert found["not_comparable"] == {"neither greedy nor seeded": 1}


def test_operators_see_the_numbers_of_a_replay(url: str) -> None:
    replay(url, "--json")

    with connect(url, None) as client:
        newest = request_json(client, "GET", "/admin/v1/replays?limit=1")["data"][0]["report"]
    counts = {name: newest[name] for name in ("drawn", "compared", "equal", "failed")}
    assert (newest["model"], newest["fingerprint"]) == (OTHER, FINGERPRINT)
    assert counts == {"drawn": 13, "compared": 9, "equal": 4, "failed": 1}
    assert (newest["median_token"], newest["median_margin"]) == (1, 1.5)


def test_a_report_that_the_gateway_does_not_keep_is_printed(url: str) -> None:
    ended = replay(url, "--json", "--seed", str(1 << 60))

    assert json.loads(ended.stdout)["total"]["equal"] == 4
    assert "The gateway's console does not show this replay: seed: " in ended.stderr

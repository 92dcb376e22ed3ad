import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from infra import asyncapi
from shared import topology
from shared.bus.base import Binding, Exchange, Message
from shared.bus.memory import MemoryBus
from shared.errors import InvalidRequest, Overloaded
from shared.log.reader import TokenChain
from shared.messages import (
    JSON,
    Announcement,
    Cancel,
    ChatMessage,
    ChatPrompt,
    Choice,
    Completed,
    Continue,
    Failed,
    Finished,
    GenerationJob,
    HandedOver,
    Progress,
    SamplingParams,
    Started,
    TextPrompt,
    TokenDelta,
    TokenPrompt,
    decode_event,
    decode_job,
    encode,
)

DOCUMENT = yaml.safe_load(asyncapi.FILE.read_text(encoding="utf-8"))
MESSAGES = [
    GenerationJob(request_id="a", model="m", prompts=(TextPrompt(text="x"),)),
    GenerationJob(
        request_id="b",
        model="org/m:1",
        prompts=(
            TokenPrompt(token_ids=(1,)),
            ChatPrompt(messages=(ChatMessage(role="user", name="n"),)),
        ),
        sampling=SamplingParams(max_tokens=1, stop=("x",), seed=-1),
        deadline=1.5,
        trace={"traceparent": "00"},
    ),
    Completed(
        request_id="a",
        choices=(Choice(token_ids=(1,), text="x", finish_reason="stop", num_prompt_tokens=1),),
    ),
    Failed(code="cancelled", message="x", param="prompt"),
    Started(worker="worker.w", ticket="t", num_prompt_tokens=(1,)),
    TokenDelta(choice=0, attempt=1, index=0, prefix_hash=1, token_ids=(1,), text="x"),
    Finished(
        choice=0, attempt=1, index=0, prefix_hash=1, token_ids=(), text="", finish_reason="length"
    ),
    HandedOver(ticket="t"),
    Cancel(request_id="a", ticket="t"),
    Continue(request_id="a", ticket="t", attempt=2, choices=(Progress(token_ids=(1,)),)),
    Announcement(
        worker="w", model="m", vocab_size=1, max_seq_len=1, fingerprint="", max_num_seqs=1
    ),
]


def validate(message: Any, name: str) -> None:
    """Check a decoded JSON message against its schema in the document."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.validate(message, schema, cls=jsonschema.Draft202012Validator)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "$ref")
    if isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from references(child)


def examples_of(message: str) -> list[dict[str, Any]]:
    examples: list[dict[str, Any]] = DOCUMENT["components"]["messages"][message]["examples"]
    return examples


def binding_of(channel: str, **parameters: str) -> Binding:
    """Where the document lets a client publish."""
    entry = DOCUMENT["channels"][channel]
    exchange = entry["bindings"]["amqp"]["exchange"]
    return Binding(
        Exchange(exchange["name"], exchange["type"]), entry["address"].format(**parameters)
    )


def test_the_document_is_what_the_code_says() -> None:
    assert asyncapi.FILE.read_text(encoding="utf-8") == asyncapi.render(), (
        "run python -m infra.asyncapi"
    )


def test_every_reference_leads_somewhere() -> None:
    found = set(references(DOCUMENT))

    assert len(found) > 20
    for reference in found:
        node = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_real_messages_fit_their_schemas(message: msgspec.Struct) -> None:
    validate(json.loads(encode(message, JSON)), type(message).__name__)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "a b"),
        ("prompts", []),
        ("prompts", [{"type": "text"}]),
        ("sampling", {"temperature": 3}),
        ("mode", "later"),
    ],
)
def test_the_schema_refuses_what_a_worker_refuses(field: str, value: object) -> None:
    job = json.loads(encode(MESSAGES[0], JSON)) | {field: value}

    with pytest.raises(jsonschema.ValidationError):
        validate(job, "GenerationJob")


def test_patterns_are_understood_outside_python() -> None:
    text = asyncapi.FILE.read_text(encoding="utf-8")

    assert not re.search(r"\\[AZz]", text)


def test_the_examples_are_valid_jobs() -> None:
    payloads = [example["payload"] for example in examples_of("GenerationJob")]

    for payload in payloads:
        validate(payload, "GenerationJob")
    jobs = [decode_job(json.dumps(payload).encode(), JSON) for payload in payloads]
    assert [job.mode for job in jobs] == ["final", "stream"]


def test_the_examples_of_a_stream_are_read_as_its_answer() -> None:
    chain, text = TokenChain(), ""
    for name in ("Started", "TokenDelta", "Finished"):
        (example,) = examples_of(name)
        validate(example["payload"], name)
        event = decode_event(json.dumps(example["payload"]).encode(), JSON)
        if isinstance(event, TokenDelta | Finished):
            assert chain.stands_at(event.index, event.prefix_hash)
            chain.extend(event.token_ids)
            text += event.text

    assert text == "The capital is Paris."


@pytest.mark.parametrize(
    ("message", "field", "unit"),
    [
        ("GenerationJob", "deadline", "Unix time in seconds"),
        ("GenerationJob", "created_at", "Unix time in seconds"),
        ("Announcement", "mean_job_work_s", "worker-seconds"),
        ("Announcement", "mean_job_tokens", "number of tokens"),
    ],
)
def test_descriptions_name_units(message: str, field: str, unit: str) -> None:
    properties = DOCUMENT["components"]["schemas"][message]["properties"]

    assert unit in properties[field]["description"]


def test_the_servers_are_those_of_the_configuration() -> None:
    servers = DOCUMENT["servers"].values()
    ports = {server["protocol"]: server["variables"]["port"]["default"] for server in servers}

    assert ports == {"amqp": "5672", "amqps": "5671"}
    for server in servers:
        places = re.findall(r"{(\w+)}", server["host"] + server["pathname"])
        assert set(places) == set(server["variables"])


def test_every_code_of_a_failed_job_is_listed() -> None:
    codes = DOCUMENT["components"]["messages"]["Failed"]["x-codes"]

    assert codes[InvalidRequest.code] == "The request is at fault."
    assert codes[Overloaded.code] == "The service could not."
    assert "queue_full" not in codes


@pytest.mark.parametrize(
    ("channel", "job_class"), [("batchJobs", "batch"), ("interactiveJobs", "interactive")]
)
async def test_a_job_published_as_documented_reaches_the_workers(
    channel: str, job_class: str
) -> None:
    async with MemoryBus() as bus:
        await topology.declare_worker(bus, "org/m", "w")
        await bus.publish(binding_of(channel, model="org/m"), Message(b"job"))

        state = await bus.inspect(f"jobs.org/m.{job_class}")

    assert state is not None
    assert state.num_ready == 1


async def test_answers_and_commands_go_where_the_document_says() -> None:
    async with MemoryBus() as bus:
        await topology.declare_worker(bus, "m", "w")
        replies = topology.reply_queue("me.mine", expires_s=60)
        await bus.declare(replies, topology.announcements_queue("g"))

        await bus.publish(binding_of("replies", user="me", id="mine"), Message(b"answer"))
        await bus.publish(binding_of("commands", worker="worker.w"), Message(b"command"))
        await bus.publish(binding_of("workers"), Message(b"announcement"))

        states = [
            await bus.inspect(queue) for queue in (replies.name, "control.worker.w", "workers.g")
        ]

    assert [state.num_ready for state in states if state is not None] == [1, 1, 1]


async def test_a_rejected_job_is_found_where_the_document_says() -> None:
    queue = DOCUMENT["channels"]["deadLetters"]["address"]
    async with MemoryBus() as bus:
        await topology.declare_worker(bus, "m", "w")
        await bus.publish(topology.jobs_binding("m", "batch"), Message(b"no job"))
        async with bus.consume("jobs.m.batch") as consumer:
            delivery = await anext(aiter(consumer))
            await delivery.reject()

        state = await bus.inspect(queue)

    assert state is not None
    assert state.num_ready == 1

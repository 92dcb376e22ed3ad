"""Writes ``infra/asyncapi.yaml``, which describes the messages that an AMQP client may exchange
with Warren.

Names come from ``shared.topology``, schemas from ``shared.messages`` and error codes from
``shared.errors``. Run ``python -m infra.asyncapi`` after you change one of them; a test compares
the file with the code.
"""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import yaml

from shared import topology
from shared.bus.base import Exchange, Queue
from shared.errors import InvalidRequest, RequestError, ServiceError, WarrenError
from shared.log import EMPTY_HASH, extend_hash
from shared.messages import (
    JSON,
    MSGPACK,
    Announcement,
    Cancel,
    Completed,
    Continue,
    Failed,
    Finished,
    GenerationJob,
    HandedOver,
    PromptScores,
    Started,
    TokenDelta,
    encode,
)

FILE = Path(__file__).with_name("asyncapi.yaml")
ASYNCAPI_VERSION = "3.0.0"

Json: TypeAlias = dict[str, Any]

ANSWERS = (Completed, Failed)
EVENTS = (Started, PromptScores, TokenDelta, Finished, HandedOver, Failed)
COMMANDS = (Cancel, Continue)
MESSAGES: tuple[type[msgspec.Struct], ...] = (
    GenerationJob,
    Completed,
    *EVENTS,
    *COMMANDS,
    Announcement,
)

_DESCRIPTION = f"""\
Text generation as durable jobs on RabbitMQ, seen from a client: `send` is what the client sends.

1. Declare a durable queue `reply.<user>.<id>` with `x-expires`, so that the broker deletes it if
   you do not return, and bind it to `{topology.REPLIES.name}` with its name as the routing key.
   `<user>` is your user of the broker. The id may be any name of letters, digits, `.`, `_` and `-`.
   One queue may receive the answers to many jobs. A job of mode `stream` is cancelled if its queue
   has no consumer, unless `is_detached` is set. A job of mode `final` needs no consumer, but its
   queue must exist until the answer arrives: nothing renews its expiry.
2. Publish the job to `{topology.JOBS.name}` with the routing key `<model>.batch`, or
   `<model>.interactive` if a user waits for the answer; interactive jobs run first. Its
   `request_id` begins with `<user>.`, and its property `user_id` is `<user>`. It runs for the
   tenant `<user>`, whatever its field `tenant` contains. Publish it persistently, as mandatory, and
   with publisher confirms. A returned message means that no worker has ever served the model, a
   negative confirm that the queue is full; try again later.
3. Read the answers, and acknowledge each one after you have stored it. `correlation_id` names the
   job that an answer belongs to. A job is executed at least once, so an answer may arrive twice:
   discard the second one.

Bodies are JSON (content_type `{JSON}`) or MessagePack (`{MSGPACK}`); answers have
the encoding of the job. New optional fields may be added at any time. A message that is not a valid
job is moved to `{topology.DEAD_LETTERS.name}`. If its reply_to belongs to you, it is first answered
with `Failed` and the code `{InvalidRequest.code}`. Workers accept commands only for your own
requests.
"""
_FIRST_TOKENS = (504, 3575)
_STREAM: tuple[tuple[str, str, msgspec.Struct], ...] = (
    (
        "1. A worker begins",
        "The first `Started` opens attempt 1. Its `is_waiting` is false, so it needs no answer.",
        Started(worker="worker.4f1c", ticket="9d2e", num_prompt_tokens=(37,)),
    ),
    (
        "2. The first tokens",
        "They count: the attempt is 1, no token was read before, and the hash is the initial one.",
        TokenDelta(
            choice=0,
            attempt=1,
            index=0,
            prefix_hash=EMPTY_HASH,
            token_ids=_FIRST_TOKENS,
            text="The capital",
        ),
    ),
    (
        "3. The last tokens",
        "They count: two tokens were read before, and the hash is theirs. The only choice has "
        "ended, and so has the job: the answer is `The capital is Paris.`",
        Finished(
            choice=0,
            attempt=1,
            index=len(_FIRST_TOKENS),
            prefix_hash=extend_hash(EMPTY_HASH, _FIRST_TOKENS),
            token_ids=(314, 7042, 30),
            text=" is Paris.",
            finish_reason="stop",
        ),
    ),
)
_PROPERTIES = {
    "type": "object",
    "description": "AMQP basic properties.",
    "required": ["content_type", "correlation_id", "reply_to", "user_id"],
    "properties": {
        "content_type": {"enum": [JSON, MSGPACK]},
        "correlation_id": {"type": "string", "description": "Returned with each answer."},
        "reply_to": {
            "type": "string",
            "pattern": r"^reply\.[A-Za-z0-9._-]{1,200}$",
            "description": f"The routing key of your queue at `{topology.REPLIES.name}`.",
        },
        "user_id": {
            "type": "string",
            "description": "Your user of the broker, which refuses any other name.",
        },
    },
}


def document() -> Json:
    """The AsyncAPI document."""
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {"title": "Warren for AMQP clients", "version": "1", "description": _DESCRIPTION},
        "servers": _servers(),
        "defaultContentType": JSON,
        "channels": _channels(),
        "operations": _operations(),
        "components": {
            "messages": {message.__name__: _message(message) for message in MESSAGES},
            "schemas": _schemas(),
            "securitySchemes": {
                "account": {"type": "userPassword", "description": "Your user of the broker."}
            },
        },
    }


def render() -> str:
    return yaml.dump(document(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _servers() -> Json:
    return {
        "broker": _server("amqp", "5672", "Without TLS, for a network that you trust."),
        "brokerOverTls": _server("amqps", "5671", "With TLS."),
    }


def _server(protocol: str, port: str, description: str) -> Json:
    return {
        "host": "{host}:{port}",
        "pathname": "/{vhost}",
        "protocol": protocol,
        "protocolVersion": "0-9-1",
        "description": description,
        "variables": {
            "host": {"description": "The broker, or one node of its cluster."},
            "port": {"default": port},
            "vhost": {"default": "warren", "description": "The virtual host, percent-encoded."},
        },
        "security": [_ref("components/securitySchemes", "account")],
    }


def _channels() -> Json:
    job = topology.jobs_binding("{model}", "batch")
    reply = topology.reply_binding("reply.{user}.{id}")
    command = topology.worker_binding("{worker}")
    model = {"description": "A name that `/v1/models` or an announcement lists."}
    return {
        "batchJobs": {
            "address": job.routing_key,
            "description": "Jobs for which no user waits.",
            "parameters": {"model": model},
            "messages": _message_refs(GenerationJob),
            "bindings": _exchange(job.exchange),
        },
        "interactiveJobs": {
            "address": topology.jobs_binding("{model}", "interactive").routing_key,
            "description": "Jobs for which a user waits. They run before batch jobs.",
            "parameters": {"model": model},
            "messages": _message_refs(GenerationJob),
            "bindings": _exchange(job.exchange),
        },
        "replies": {
            "address": reply.routing_key,
            "description": "Your own queue, bound under this routing key.",
            "parameters": {
                "user": {"description": "Your user of the broker."},
                "id": {"description": "Your choice: letters, digits, `.`, `_`, `-`."},
            },
            "messages": _message_refs(Completed, *EVENTS),
            "bindings": _exchange(reply.exchange),
        },
        "commands": {
            "address": command.routing_key,
            "description": "Commands to one worker, always MessagePack.",
            "parameters": {"worker": {"description": "The `worker` of the job's last `Started`."}},
            "messages": _message_refs(*COMMANDS),
            "bindings": _exchange(command.exchange),
        },
        "workers": {
            "address": "",
            "description": "Announcements of workers, every few seconds, always MessagePack. "
            "Publishers receive them in an exclusive queue `reply.<user>.<id>.workers`.",
            "messages": _message_refs(Announcement),
            "bindings": _exchange(topology.WORKERS),
        },
        "deadLetters": {
            "address": topology.DEAD_LETTERS.name,
            "description": "For operators: jobs that no worker could read, that used names of "
            "another publisher, or that were returned too often. The header `x-death` contains "
            "the reason. A job whose deadline has passed is answered instead, unless its message "
            "had an `expiration`.",
            "messages": _message_refs(GenerationJob),
            "bindings": _queue(topology.DEAD_LETTERS),
        },
    }


def _operations() -> Json:
    return {
        "submitBatchJob": _submit("batchJobs"),
        "submitInteractiveJob": _submit("interactiveJobs"),
        "readStream": {
            "action": "receive",
            "channel": _ref("channels", "replies"),
            "description": "A job of mode `stream` needs a queue of its own, which holds its log. "
            "A `Started` with the ticket of the last one is a repetition. A `Started` whose "
            "(publication, is_alone, num_returns) is not greater than the newest one's opens no "
            "attempt: answer it with `Cancel` and its ticket, and with `is_replaced` if both are "
            "equal. Any other `Started` opens an attempt: the first is 1, or 2 if `is_waiting` is "
            "true, and each later one is greater by 1. Any other event counts only if its attempt "
            "is the current one, its index is the number of the choice's tokens so far, and its "
            "prefix_hash is their FNV-1a hash (64 bits, over whole token ids). Discard all others, "
            "except a `Failed` with the ticket of a `Started` of the newest delivery. The job ends "
            "with the `Finished` of its last choice, or with `Failed`.",
            "messages": [_channel_message("replies", event) for event in EVENTS],
        },
        "continueStream": {
            "action": "send",
            "channel": _ref("channels", "commands"),
            "description": "The answer to every `Started` that opens an attempt, except a first "
            "one whose `is_waiting` is false. Its ticket is that of the `Started`. The previous "
            "worker was lost or has handed over the job, and this one continues after the tokens "
            "that you have. If `is_waiting` is true, the job was delivered before, and its worker "
            "generates nothing until it receives this answer.",
            "messages": [_channel_message("commands", Continue)],
        },
        "cancelStream": {
            "action": "send",
            "channel": _ref("channels", "commands"),
            "description": "Stops a job of mode `stream`.",
            "messages": [_channel_message("commands", Cancel)],
        },
        "watchWorkers": {"action": "receive", "channel": _ref("channels", "workers")},
        "readDeadLetters": {"action": "receive", "channel": _ref("channels", "deadLetters")},
    }


def _submit(channel: str) -> Json:
    return {
        "action": "send",
        "channel": _ref("channels", channel),
        "messages": [_channel_message(channel, GenerationJob)],
        "bindings": {"amqp": {"deliveryMode": 2, "mandatory": True, "bindingVersion": "0.3.0"}},
        "reply": {
            "channel": _ref("channels", "replies"),
            "messages": [_channel_message("replies", answer) for answer in ANSWERS],
        },
    }


def _message(message: type[msgspec.Struct]) -> Json:
    entry: Json = {
        "name": tag(message),
        "summary": docstring(message).split("\n")[0],
        "payload": _ref("components/schemas", message.__name__),
    }
    if message is GenerationJob:
        entry |= {"headers": _PROPERTIES, "examples": _questions()}
    if examples := [_seen(*event) for event in _STREAM if isinstance(event[2], message)]:
        entry["examples"] = examples
    if message is Failed:
        entry["x-codes"] = _codes()
    if message in (*COMMANDS, Announcement):
        entry["contentType"] = MSGPACK
    return entry


def _questions() -> list[Json]:
    question = _question("row-17", "reply.publisher.my-results")
    # A stream has a queue of its own, because the queue is its log.
    streamed = _question("row-18", "reply.publisher.row-18")
    streamed["payload"]["mode"] = "stream"
    return [{"name": "A question", **question}, {"name": "A question to stream", **streamed}]


def _seen(name: str, summary: str, event: msgspec.Struct) -> Json:
    """An event of the stream that answers the second question."""
    headers = {"content_type": JSON, "correlation_id": "row-18"}
    payload = json.loads(encode(event, JSON))
    return {"name": name, "summary": summary, "headers": headers, "payload": payload}


def _question(row: str, reply_to: str) -> Json:
    return {
        "headers": {
            "content_type": JSON,
            "correlation_id": row,
            "reply_to": reply_to,
            "user_id": "publisher",
        },
        "payload": {
            "type": tag(GenerationJob),
            "request_id": f"publisher.{row}",
            "model": "smollm2",
            "prompts": [
                {
                    "type": "chat",
                    "messages": [{"role": "user", "content": "What is the capital of France?"}],
                }
            ],
            "sampling": {"max_tokens": 32, "temperature": 0},
        },
    }


def _codes() -> dict[str, str]:
    """The possible codes of a `Failed`, and whether the request or the service is at fault."""
    faults = {error.code: "The request is at fault." for error in _leaves(RequestError)}
    return faults | {error.code: "The service could not." for error in _leaves(ServiceError)}


def _leaves(root: type[WarrenError]) -> list[type[WarrenError]]:
    # Subclasses that other modules define are never sent.
    return [error for error in root.__subclasses__() if error.__module__ == root.__module__]


def _schemas() -> Json:
    _, components = msgspec.json.schema_components(
        MESSAGES, ref_template="#/components/schemas/{name}"
    )
    documented = {struct.__name__: field_docs(struct) for struct in _structs(msgspec.Struct)}
    for name, schema in components.items():
        for field, doc in documented.get(name, {}).items():
            if field in schema.get("properties", {}):
                schema["properties"][field]["description"] = doc
    schemas: Json = _plain(components)
    return schemas


def _structs(root: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """The structs of `shared.messages`."""
    for struct in root.__subclasses__():
        if struct.__module__.startswith("shared.messages."):
            yield struct
        yield from _structs(struct)


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """What the source says below each field, with its unit."""
    (definition,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, below in pairwise(definition.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                docs[name] = " ".join(doc.split())
    return docs


def _plain(schema: Any) -> Any:
    """Convert a schema to what AsyncAPI and other languages understand."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # msgspec writes discriminators in OpenAPI's format. In AsyncAPI they are names, and tagged
    # structs do not need them.
    plain = {name: _plain(value) for name, value in schema.items() if name != "discriminator"}
    if isinstance(plain.get("pattern"), str):
        plain["pattern"] = re.sub(r"\\Z$", "$", plain["pattern"])  # \Z exists only in Python
    if isinstance(plain.get("description"), str):
        plain["description"] = inspect.cleandoc(plain["description"])
    return plain


def _exchange(exchange: Exchange) -> Json:
    properties = {"name": exchange.name, "type": exchange.kind, "durable": True}
    return {"amqp": {"is": "routingKey", "exchange": properties, "bindingVersion": "0.3.0"}}


def _queue(queue: Queue) -> Json:
    properties = {"name": queue.name, "durable": True, "exclusive": False, "autoDelete": False}
    return {"amqp": {"is": "queue", "queue": properties, "bindingVersion": "0.3.0"}}


def _message_refs(*messages: type[msgspec.Struct]) -> Json:
    return {message.__name__: _ref("components/messages", message.__name__) for message in messages}


def _channel_message(channel: str, message: type[msgspec.Struct]) -> Json:
    return _ref(f"channels/{channel}/messages", message.__name__)


def _ref(place: str, name: str) -> Json:
    return {"$ref": f"#/{place}/{name}"}


def tag(message: type[msgspec.Struct]) -> str:
    """The value of the field ``type``; empty if there is none."""
    return str(message.__struct_config__.tag or "")


def docstring(message: type[msgspec.Struct]) -> str:
    """The text of a struct's docstring."""
    return inspect.getdoc(message) or ""


class _Dumper(yaml.SafeDumper):
    """Represents strings of several lines as block literals, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)

if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")

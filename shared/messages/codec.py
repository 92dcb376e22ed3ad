"""Encoding and decoding of messages."""

import re
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from shared.errors import UndecodableMessage
from shared.messages.commands import Announcement, Command
from shared.messages.events import ReplyEvent
from shared.messages.fields import MAX_EMBEDDING_INPUTS, WIRE_VERSION, ReplyKey, RequestId
from shared.messages.jobs import GenerationJob, QuickJob
from shared.messages.open_values import check_open_values
from shared.messages.usage import AdmissionRequest, Ended, UsageRecord, UsageReport

MSGPACK = "application/msgpack"
JSON = "application/json"

_T = TypeVar("_T")


class _Version(Struct):
    """Decodes only the version, because the rest of a newer job may not be readable."""

    version: int = WIRE_VERSION


class _OpenPrompt(Struct):
    """Cuts out the parts of a prompt that may hold values of any kind, without decoding them."""

    tools: msgspec.Raw = msgspec.Raw()
    template_kwargs: msgspec.Raw = msgspec.Raw()


class _OpenJob(Struct):
    """Decodes the prompts of a job as far as their parts of any kind are concerned. The job itself
    may have fewer prompts, if it is a generation."""

    prompts: Annotated[tuple[_OpenPrompt, ...], Meta(max_length=MAX_EMBEDDING_INPUTS)] = ()
    prompt: _OpenPrompt | None = None


class _Identified(Struct):
    """Decodes only the request id, because the rest may not be a job."""

    request_id: RequestId


def _without_value(error: Exception) -> str:
    """The error message without the invalid value, which may be a prompt and must not be logged."""
    return re.sub(
        r"(Invalid (?:enum )?value) .*?( - at `[^`]*`)?$", r"\1\2", str(error), flags=re.DOTALL
    )


class _Codec(Generic[_T]):
    """The two reusable decoders, MessagePack and JSON, of a family of messages."""

    def __init__(self, family: Any) -> None:
        self._msgpack: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(family)
        self._json: msgspec.json.Decoder[_T] = msgspec.json.Decoder(family)

    def decode(self, body: bytes, content_type: str) -> _T:
        decoder = self._json if content_type == JSON else self._msgpack
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            reason = _without_value(error)
            if content_type != JSON:
                reason += f"; it was read as MessagePack, because its content type is not {JSON}"
            raise UndecodableMessage(reason) from None


_JOB: _Codec[GenerationJob] = _Codec(GenerationJob)
_QUICK_JOB: _Codec[QuickJob] = _Codec(QuickJob)
_EVENT: _Codec[ReplyEvent] = _Codec(ReplyEvent)
_COMMAND: _Codec[Command] = _Codec(Command)
_USAGE: _Codec[UsageReport | Ended | AdmissionRequest] = _Codec(
    UsageReport | Ended | AdmissionRequest
)
_RECORD: _Codec[UsageRecord] = _Codec(UsageRecord)
_ANNOUNCEMENT: _Codec[Announcement] = _Codec(Announcement)
_VERSION: _Codec[_Version] = _Codec(_Version)
_OPEN_JOB: _Codec[_OpenJob] = _Codec(_OpenJob)
_IDENTIFIED: _Codec[_Identified] = _Codec(_Identified)
_MSGPACK_ENCODER = msgspec.msgpack.Encoder()
_JSON_ENCODER = msgspec.json.Encoder()


def encode(message: Struct, content_type: str = MSGPACK) -> bytes:
    return (
        _JSON_ENCODER.encode(message) if content_type == JSON else _MSGPACK_ENCODER.encode(message)
    )


def decode_job(body: bytes, content_type: str = MSGPACK) -> GenerationJob:
    """Decode and validate a job. Raises `UndecodableMessage`, also for another wire version."""
    _check_before(body, content_type)
    return _JOB.decode(body, content_type)


def decode_quick_job(body: bytes, content_type: str = MSGPACK) -> QuickJob:
    """Decode and validate a quick job. Raises `UndecodableMessage`, also for another wire
    version."""
    _check_before(body, content_type)
    return _QUICK_JOB.decode(body, content_type)


def request_id_in(body: bytes, content_type: str = MSGPACK) -> str:
    """The request id in a message that may not be a job otherwise; empty if it cannot be read."""
    try:
        return _IDENTIFIED.decode(body, content_type).request_id
    except UndecodableMessage:
        return ""


def is_reply_key(routing_key: str) -> bool:
    """Whether a routing key is that of a reply queue. Any publisher can choose the ``reply_to`` of
    a job."""
    try:
        msgspec.convert(routing_key, ReplyKey)
    except msgspec.ValidationError:
        return False
    return True


def decode_event(body: bytes, content_type: str = MSGPACK) -> ReplyEvent:
    """Decode a reply event. Raises `UndecodableMessage`."""
    return _EVENT.decode(body, content_type)


def decode_command(body: bytes) -> Command:
    """Decode a command. Raises `UndecodableMessage`."""
    return _COMMAND.decode(body, MSGPACK)


def decode_announcement(body: bytes) -> Announcement:
    """Decode a worker's announcement. Raises `UndecodableMessage`."""
    return _ANNOUNCEMENT.decode(body, MSGPACK)


def decode_usage(body: bytes) -> UsageReport | Ended | AdmissionRequest:
    """Decode a report on the use of API keys and tenants, or a worker's question about it. Raises
    `UndecodableMessage`."""
    return _USAGE.decode(body, MSGPACK)


def decode_record(body: bytes) -> UsageRecord:
    """Decode the usage record of a request. Raises `UndecodableMessage`."""
    return _RECORD.decode(body, MSGPACK)


def _check_before(body: bytes, content_type: str) -> None:
    """Check the version and the open values of a job before it is decoded, because decoding may
    take a hundred times the memory of its body."""
    version = _VERSION.decode(body, content_type).version
    if version != WIRE_VERSION:
        raise UndecodableMessage(f"wire version {version}, expected {WIRE_VERSION}")
    job = _OPEN_JOB.decode(body, content_type)
    prompts = job.prompts if job.prompt is None else (*job.prompts, job.prompt)
    parts = [bytes(part) for one in prompts for part in (one.tools, one.template_kwargs) if part]
    if parts:
        check_open_values(parts, is_json=content_type == JSON)

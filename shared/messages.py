"""Every struct on the wire, and the only place where bytes are decided.

Facts are nouns (`TokenDelta`), commands are imperatives (`Cancel`). Structs are frozen, tagged and
keyword-only. A new field has a default, so that old bytes stay readable; a change that old readers
would misread raises `WIRE_VERSION`. Between Warren's own processes the body is MessagePack; jobs
from other programs may be JSON, and are answered in JSON.

The limits in the annotations are the only ones: the gateway checks requests against them before
it publishes, the worker checks what any publisher sent.
"""

import hashlib
import re
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from shared.errors import UndecodableMessage

WIRE_VERSION = 1
MSGPACK = "application/msgpack"
JSON = "application/json"

MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_TEXT_CHARS = 1 << 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256

RequestId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}\Z")]
ModelName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}\Z")]
ReplyKey: TypeAlias = Annotated[str, Meta(pattern=r"^reply\.[A-Za-z0-9._-]{1,200}\Z")]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds: TypeAlias = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TEXT_CHARS)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]

JobClass: TypeAlias = Literal["interactive", "batch"]
Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
FinishReason: TypeAlias = Literal["stop", "length"]


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class _Wire(Struct, frozen=True, kw_only=True, tag=_snake_case):
    """What all structs on the wire share."""


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: Role
    content: Text = ""
    name: Annotated[str, Meta(max_length=256)] | None = None


class ChatPrompt(_Wire, frozen=True, kw_only=True, tag="chat"):
    """A conversation; the worker applies the model's chat template."""

    messages: Annotated[tuple[ChatMessage, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]


class TextPrompt(_Wire, frozen=True, kw_only=True, tag="text"):
    """Plain text; the tokenizer adds its special tokens."""

    text: Text


class TokenPrompt(_Wire, frozen=True, kw_only=True, tag="tokens"):
    """Token ids, taken as they are."""

    token_ids: Annotated[TokenIds, Meta(min_length=1)]


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How one choice is drawn. The same seed and prompt give the same tokens on any worker."""

    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    """None: as many as the model's context still holds."""
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    """0 is greedy: the most likely token, whatever the other fields say."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """0: all tokens."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    """None: drawn from the request id, so that a redelivered job draws the same numbers."""
    stop: Annotated[tuple[StopString, ...], Meta(max_length=MAX_STOP_STRINGS)] = ()
    ignore_eos: bool = False


class GenerationJob(_Wire, frozen=True, kw_only=True):
    """One request. Choice k of the answer continues ``prompts[k]``."""

    request_id: RequestId
    model: ModelName
    prompts: Annotated[tuple[Prompt, ...], Meta(min_length=1, max_length=MAX_PROMPTS)]
    sampling: SamplingParams = SamplingParams()
    mode: Literal["stream", "final"] = "final"
    """``stream``: the whole log of events. ``final``: one `Completed` or `Failed`."""
    deadline: Annotated[float, Meta(ge=0.0)] | None = None
    """Unix time in seconds after which the job is answered with ``deadline_exceeded``."""
    created_at: Annotated[float, Meta(ge=0.0)] = 0.0
    """Unix time in seconds at the publisher; 0 if it did not say."""
    tenant: Annotated[str, Meta(max_length=128)] = ""
    is_detached: bool = False
    """The client may be away: a reply queue without a reader does not cancel the job."""
    trace: Annotated[dict[str, str], Meta(max_length=16)] = {}
    """W3C trace context of the publisher."""
    version: int = WIRE_VERSION

    @property
    def seed(self) -> int:
        """The seed of choice 0 as an unsigned 64-bit number."""
        if self.sampling.seed is not None:
            return self.sampling.seed % (1 << 64)
        return int.from_bytes(hashlib.sha256(self.request_id.encode()).digest()[:8], "big")


class _Version(Struct):
    """Reads the version alone: the rest of a newer job may not be readable."""

    version: int = WIRE_VERSION


class Accepted(_Wire, frozen=True, kw_only=True):
    """A gateway has taken a request that bears an Idempotency-Key."""

    body_hash: Annotated[str, Meta(max_length=128)]


class Started(_Wire, frozen=True, kw_only=True):
    """A worker has taken the job. The n-th ticket in a log opens attempt n."""

    worker: str
    """The worker's address: the routing key of its commands."""
    ticket: Annotated[str, Meta(max_length=64)]
    """Names this run of the job: the commands of its reader bear it."""
    num_prompt_tokens: tuple[Count, ...]
    """Tokens of each prompt, the chat template's included."""
    is_waiting: bool = False
    """The job was delivered before: the worker waits for `Continue`, also in attempt 1."""


class HandedOver(_Wire, frozen=True, kw_only=True):
    """The worker of this attempt drains: the `Started` that follows is not a crash."""

    attempt: Count


class TokenDelta(_Wire, frozen=True, kw_only=True):
    """New tokens of one choice.

    ``index`` is the number of the choice's tokens before these and ``prefix_hash`` their hash
    (`shared.stream.extend_hash`). ``text`` is a function of the token ids sent so far, not of how
    they were cut into events.
    """

    choice: Count
    attempt: Count
    index: Count
    prefix_hash: Count
    token_ids: TokenIds
    text: str


class Finished(_Wire, frozen=True, kw_only=True):
    """The last tokens of one choice. The request ends with the `Finished` of its last choice."""

    choice: Count
    attempt: Count
    index: Count
    prefix_hash: Count
    token_ids: TokenIds
    text: str
    """What these tokens add, and what was held back: half a character, a possible stop string."""
    finish_reason: FinishReason
    stop_reason: str | None = None
    """The stop string that was met."""
    num_cached_tokens: Count = 0
    """Tokens of the choice's prompt that the worker did not have to compute."""


class Failed(_Wire, frozen=True, kw_only=True):
    """The request ends here with an error; ``code`` is one of `shared.errors`.

    Attempt 0 refuses a job before any `Started`; otherwise the position is that of ``choice``.
    """

    code: str
    message: str
    param: str | None = None
    choice: Count = 0
    attempt: Count = 0
    index: Count = 0
    prefix_hash: Count = 0


class Choice(Struct, frozen=True, kw_only=True):
    token_ids: TokenIds
    text: str
    finish_reason: FinishReason
    stop_reason: str | None = None
    num_prompt_tokens: Count
    num_cached_tokens: Count = 0
    """Those of them that the worker did not have to compute."""


class Completed(_Wire, frozen=True, kw_only=True):
    """The whole answer, for jobs of mode ``final``."""

    request_id: RequestId
    choices: tuple[Choice, ...]


ReplyEvent: TypeAlias = Accepted | Started | HandedOver | TokenDelta | Finished | Failed | Completed


class Cancel(_Wire, frozen=True, kw_only=True):
    """Stop work on a request: on the run that bears ``ticket``, or on any when None."""

    request_id: RequestId
    ticket: str | None = None


class Progress(Struct, frozen=True, kw_only=True):
    """What a reader has accepted of one choice."""

    token_ids: TokenIds = ()
    is_finished: bool = False


class Continue(_Wire, frozen=True, kw_only=True):
    """A reader's answer to a `Started` that waits or that is not the first: go on from here."""

    request_id: RequestId
    ticket: str
    attempt: Count
    choices: tuple[Progress, ...]


class Release(_Wire, frozen=True, kw_only=True):
    """To all gateways: whoever reads this request's log lets go of it."""

    request_id: RequestId


Command: TypeAlias = Cancel | Continue | Release


class Announcement(_Wire, frozen=True, kw_only=True):
    """What a worker says of itself, every few seconds and when it leaves."""

    worker: str
    model: ModelName
    vocab_size: Count
    max_seq_len: Count
    fingerprint: str
    """Of weights and tokenizer: workers of one model name agree on it."""
    max_num_seqs: Count
    num_running: Count = 0
    num_waiting: Count = 0
    kv_usage: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    is_leaving: bool = False


_T = TypeVar("_T")


def _without_value(error: Exception) -> str:
    """What was wrong and where; the value itself may be a prompt, and this goes into logs."""
    return re.sub(
        r"(Invalid (?:enum )?value) .*?( - at `[^`]*`)?$", r"\1\2", str(error), flags=re.DOTALL
    )


class _Codec(Generic[_T]):
    """The two reused decoders of one family of messages."""

    def __init__(self, family: Any) -> None:
        self._msgpack: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(family)
        self._json: msgspec.json.Decoder[_T] = msgspec.json.Decoder(family)

    def decode(self, body: bytes, content_type: str) -> _T:
        decoder = self._json if content_type == JSON else self._msgpack
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UndecodableMessage(_without_value(error)) from None


_JOB: _Codec[GenerationJob] = _Codec(GenerationJob)
_EVENT: _Codec[ReplyEvent] = _Codec(ReplyEvent)
_COMMAND: _Codec[Command] = _Codec(Command)
_ANNOUNCEMENT: _Codec[Announcement] = _Codec(Announcement)
_VERSION: _Codec[_Version] = _Codec(_Version)
_MSGPACK_ENCODER = msgspec.msgpack.Encoder()
_JSON_ENCODER = msgspec.json.Encoder()


def encode(message: Struct, content_type: str = MSGPACK) -> bytes:
    return (
        _JSON_ENCODER.encode(message) if content_type == JSON else _MSGPACK_ENCODER.encode(message)
    )


def decode_job(body: bytes, content_type: str = MSGPACK) -> GenerationJob:
    """Decode and check a job. Raises `UndecodableMessage`, also for another wire version."""
    version = _VERSION.decode(body, content_type).version
    if version != WIRE_VERSION:
        raise UndecodableMessage(f"wire version {version}, expected {WIRE_VERSION}")
    return _JOB.decode(body, content_type)


def is_reply_key(routing_key: str) -> bool:
    """Whether answers may go there: whoever publishes a job chooses it."""
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

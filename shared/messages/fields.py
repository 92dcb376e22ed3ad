"""The types of fields, with the limits that apply to every publisher.

The gateway checks requests against them before it publishes; the worker checks jobs of any
publisher.
"""

import re
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

WIRE_VERSION = 1

MAX_PROMPTS = 128
MAX_EMBEDDING_INPUTS = 2048
MAX_EMBEDDING_DIMENSIONS = 65_536
MAX_CHOICES = 128
"""For all prompts of a job together."""
MAX_MESSAGES = 4096
MAX_TEXT_CHARS = 1 << 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_TOOLS = 128
MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 1 << 16
MAX_CONTEXT_BYTES = 1 << 20

RequestId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
ModelName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}\Z")]
ReplyKey: TypeAlias = Annotated[str, Meta(pattern=r"^reply\.[A-Za-z0-9._-]{1,200}\Z")]
Tenant: TypeAlias = Annotated[str, Meta(max_length=128)]
KeyId: TypeAlias = Annotated[str, Meta(max_length=64)]
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds: TypeAlias = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TEXT_CHARS)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""Exact as a number of JSON; the sum of as many as a message may have can still be encoded."""
PrefixHash: TypeAlias = Annotated[int, Meta(ge=0)]
Execution: TypeAlias = Count
"""A random number that distinguishes executions of a request id, or 0 if the id is used once."""
Probability: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]
UnixTime: TypeAlias = Annotated[float, Meta(ge=0.0)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
NumTopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Context: TypeAlias = Annotated[bytes, Meta(max_length=MAX_CONTEXT_BYTES)]
TraceContext: TypeAlias = Annotated[dict[str, str], Meta(max_length=16)]
"""A W3C trace context, by the names of its headers."""

JobClass: TypeAlias = Literal["interactive", "batch"]
Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
FinishReason: TypeAlias = Literal["stop", "length"]


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Wire(Struct, frozen=True, kw_only=True, tag=_snake_case):
    """The base of all tagged structs."""


class Hedge(Struct, frozen=True, kw_only=True):
    """Why a gateway has published a job beside a run that has it."""

    number: Count
    """Identifies the hedge within its request, also if its message is published again."""
    num_tokens: Count = 0
    """The tokens that the log had when the hedge was published, of all choices together. A hedge
    whose log has got further since is too late."""

"""What it takes to word a stream again: travels with the job and comes back in `Started`."""

from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from shared.errors import InvalidRequest
from shared.messages import MAX_CONTEXT_BYTES

Endpoint: TypeAlias = Literal["chat", "completions", "responses"]


class StreamContext(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request is to be answered. Its answer is a function of this and of its log."""

    endpoint: Endpoint
    request_id: str
    model: str
    created: int
    """Unix time in seconds."""
    tenant: str = ""
    body_hash: str = ""
    num_prompts: int = 1
    num_choices: int = 1
    """Answers to each prompt that the client wants."""
    best_of: int = 0
    """Answers to each prompt that are drawn, where these are more; 0: as many as are wanted."""
    is_stream: bool = False
    is_detached: bool = False
    """The request goes on without a client."""
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    """How many alternatives to each token the client wants to see; None: no logprobs."""
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    """Tokens among logprobs are worded ``token_id:17``."""
    tool_parser: str | None = None
    """The form of calls to look for; None: the text is text."""
    is_forced: bool = False
    """The model can write nothing but calls."""
    is_single_call: bool = False
    """Calls after the first are dropped."""
    reasoning_parser: str | None = None
    include_reasoning: bool = True
    fingerprint: str | None = None
    echoed: bytes = b"{}"
    """What a response of the Responses API repeats of its request, as JSON."""

    @property
    def num_drawn(self) -> int:
        """Choices of each prompt in the log."""
        return self.best_of or self.num_choices

    @property
    def total_drawn(self) -> int:
        """Choices in the log."""
        return self.num_prompts * self.num_drawn

    def encode(self) -> bytes:
        """Bytes for `GenerationJob.context`. Raises `InvalidRequest` where they are too many."""
        encoded = _ENCODER.encode(self)
        if len(encoded) > MAX_CONTEXT_BYTES:
            repeated = msgspec.json.decode(self.echoed, type=dict[str, msgspec.Raw])
            param = max(repeated, key=lambda name: len(repeated[name]))
            raise InvalidRequest(
                f"{param}: what a response repeats of its request is longer than "
                f"{MAX_CONTEXT_BYTES} bytes.",
                param=param,
            )
        return encoded


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StreamContext)


def decode_context(context: bytes) -> StreamContext:
    """Raises `msgspec.MsgspecError` where another program wrote these bytes."""
    return _DECODER.decode(context)

"""The facts that are needed to render a stream again; sent with the job and returned in
`Started`."""

from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from shared.errors import InvalidRequest
from shared.messages import MAX_CONTEXT_BYTES

Endpoint: TypeAlias = Literal["chat", "completions", "responses"]


class StreamContext(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request is to be answered. The response is a function of this and of the log."""

    endpoint: Endpoint
    request_id: str
    model: str
    created: int
    """Unix time in seconds."""
    tenant: str = ""
    body_hash: str = ""
    num_prompts: int = 1
    num_choices: int = 1
    """Answers to each prompt that the client requests."""
    best_of: int = 0
    """Answers generated for each prompt, if more than requested; otherwise 0."""
    is_stream: bool = False
    is_detached: bool = False
    """The request continues without a client."""
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    """The number of alternatives to each token in the response; None: no logprobs."""
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    """Tokens in logprobs are rendered as ``token_id:17``."""
    tool_parser: str | None = None
    """The format of tool calls to parse; None: the text contains none."""
    is_forced: bool = False
    """The model is constrained to write only tool calls."""
    is_single_call: bool = False
    """Tool calls after the first are dropped."""
    reasoning_parser: str | None = None
    include_reasoning: bool = True
    fingerprint: str | None = None
    echoed: bytes = b"{}"
    """The request's fields that a response of the Responses API repeats, as JSON."""

    @property
    def num_drawn(self) -> int:
        """Generated choices per prompt."""
        return self.best_of or self.num_choices

    @property
    def total_drawn(self) -> int:
        """Generated choices in the log."""
        return self.num_prompts * self.num_drawn

    def encode(self) -> bytes:
        """Encode for `GenerationJob.context`. Raises `InvalidRequest` if the result is too long."""
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
    """Raises `msgspec.MsgspecError` if another program wrote these bytes."""
    return _DECODER.decode(context)

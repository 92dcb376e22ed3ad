"""How to render the answer to a request; stored in its log."""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from gateway.log.cursor import NOT_FOUND, LogFacts, decode_facts
from shared.errors import InvalidRequest, StreamNotFound
from shared.messages import MAX_CHOICES, MAX_CONTEXT_BYTES, MAX_PROMPTS

Endpoint: TypeAlias = Literal["chat", "completions", "responses", "messages"]
ServiceTier: TypeAlias = Literal["default", "flex"]


class Rendering(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a log is rendered. The response is a function of this and of the log."""

    endpoint: Endpoint
    request_id: str
    model: str
    created: int
    """Unix time in seconds."""
    num_prompts: Annotated[int, Meta(ge=1, le=MAX_PROMPTS)] = 1
    num_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """Answers to each prompt that the client requests."""
    best_of: Annotated[int, Meta(ge=0, le=MAX_CHOICES)] = 0
    """Answers generated for each prompt, if more than requested; otherwise 0."""
    max_tokens: int | None = None
    """The limit of an answer that may end before it because the context does."""
    is_stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    is_obfuscated: bool = False
    """Chunks of a stream are padded."""
    echo: bool = False
    logprobs: int | None = None
    """The number of alternatives to each token in the response; None: no logprobs."""
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    """Tokens in logprobs are rendered as ``token_id:17``."""
    tool_parser: str | None = None
    """The format of tool calls to parse; None: the text contains none."""
    tool_names: tuple[str, ...] | None = None
    """The functions that may be called; None: any. What names another one is text."""
    text_parameters: dict[str, tuple[str, ...]] | None = None
    """Of each of these functions the parameters that are text, if the parser needs them."""
    custom_tools: tuple[str, ...] = ()
    """Those of the functions that clients know as custom tools."""
    num_earlier_calls: int = 0
    """The calls of the conversation, if the ids of further ones count them."""
    is_forced: bool = False
    """The model is constrained to write only tool calls."""
    has_functions: bool = False
    """A call has the older form of a chat, `function_call`."""
    is_single_call: bool = False
    """Tool calls after the first are dropped."""
    reasoning_parser: str | None = None
    include_reasoning: bool = True
    fingerprint: str | None = None
    service_tier: ServiceTier | None = None
    """The one in which the request is served, if it names any."""
    is_stored: bool = False
    """The response is stored in the database."""
    echoed: bytes = b"{}"
    """The request's fields that a response of the Responses API repeats, as JSON."""

    @property
    def is_plain(self) -> bool:
        """Whether all text is content: there is neither reasoning nor a call to parse."""
        return self.tool_parser is None and self.reasoning_parser is None

    @property
    def num_drawn(self) -> int:
        """Generated choices per prompt."""
        return self.best_of or self.num_choices

    @property
    def total_drawn(self) -> int:
        """Generated choices in the log."""
        return self.num_prompts * self.num_drawn

    def in_log(
        self, *, tenant: str, body_hash: str, is_detached: bool, trace_id: str = ""
    ) -> LogFacts:
        """The facts of the request that its log carries. Raises `InvalidRequest` if they are too
        long."""
        facts = LogFacts(
            tenant=tenant,
            body_hash=body_hash,
            num_choices=self.total_drawn,
            is_detached=is_detached,
            trace_id=trace_id,
            rendering=_ENCODER.encode(self),
        )
        if len(facts.encode()) > MAX_CONTEXT_BYTES:
            repeated = msgspec.json.decode(self.echoed, type=dict[str, msgspec.Raw])
            # Apart from what is repeated, only the names of tools and of their parameters are long.
            param = max(repeated, key=lambda name: len(repeated[name]), default="tools")
            raise InvalidRequest(
                f"{param}: the part of the request that its response needs is longer than "
                f"{MAX_CONTEXT_BYTES} bytes.",
                param=param,
            )
        return facts


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Rendering)


def decode_rendering(facts: LogFacts) -> Rendering:
    """Raises `StreamNotFound` if another program wrote it."""
    try:
        rendering = _DECODER.decode(facts.rendering)
    except (msgspec.MsgspecError, RecursionError):
        raise StreamNotFound(NOT_FOUND) from None
    if rendering.total_drawn != facts.num_choices:
        raise StreamNotFound(NOT_FOUND)
    return rendering


def rendering_of(context: bytes) -> Rendering:
    """The rendering in a job's context. Raises `StreamNotFound` and `msgspec.MsgspecError` if
    another program wrote it."""
    return decode_rendering(decode_facts(context))

"""The protocol of an adapter: what it knows of a kind of server."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from shared.errors import EngineFailed
from shared.messages import Constraint, SamplingParams
from worker.engine.interface import TokenScore
from worker.text import Tokenizer

UNKNOWN = "unknown"
"""The version of a server that does not state it."""
JsonObject: TypeAlias = Mapping[str, Any]
End: TypeAlias = Literal["stop", "length"]

NONSENSE = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What an adapter may raise if an answer is not as it expects."""

BY_THE_WORKER = (
    "max_tokens",
    "clamp_max_tokens",
    "stop",
    "include_stop_in_output",
    "skip_special_tokens",
)
"""The sampling parameters that the worker applies itself, to the text of any engine."""
WITH_TOKEN_IDS = ("stop_token_ids", "min_tokens", "allowed_token_ids", "constraint")
"""The sampling parameters that the worker can apply itself if the engine returns token ids and can
ban tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """What an engine can do, as data."""

    name: str
    """The value of ``--engine``."""
    versions: tuple[str, ...]
    """The versions of the server, or how they begin, that the adapter was tried with."""
    was_run: bool = True
    """Whether it was tried. Otherwise it follows the source of these versions."""
    parameters: frozenset[str]
    """The sampling parameters that the engine applies, by their names in `SamplingParams`."""
    constraints: frozenset[str] = frozenset()
    """The kinds of constraints that are sent to the engine in its own form."""
    has_token_ids: bool = True
    """Whether it takes and returns token ids rather than text."""
    repeats_seeds: bool = True
    """Whether equal seeds give equal tokens, as far as the engine repeats a greedy answer."""
    states_max_seq_len: bool = True
    """Whether the server states its context length. Otherwise the operator must set it."""
    states_num_slots: bool = False
    """Whether the server states how many sequences it runs at once."""
    has_min_tokens: bool = False
    """Whether the engine applies ``min_tokens``. Otherwise the worker bans the end tokens in a
    first request."""
    remarks: str = ""

    def knows(self, version: str) -> bool:
        """Whether a version of the server is one of ``versions``."""
        return any(re.match(rf"{re.escape(known)}(?!\d)", version) for known in self.versions)

    def can(self, parameter: str) -> bool:
        """Whether requests may use a sampling parameter."""
        if parameter == "constraint" and self.constraints:
            return True
        known = (*BY_THE_WORKER, *(WITH_TOKEN_IDS if self.has_token_ids else ()))
        return parameter in known or parameter in self.parameters

    @property
    def unsupported(self) -> tuple[str, ...]:
        """The sampling parameters with which a request is refused."""
        return tuple(name for name in SamplingParams.__struct_fields__ if not self.can(name))


class Ask(NamedTuple):
    """A request to an engine: to continue a sequence by some tokens."""

    token_ids: Sequence[int]
    """The prompt and the output so far."""
    max_tokens: int
    sampling: SamplingParams
    seed: int
    """31 bits, which every engine accepts."""
    min_tokens: int = 0
    """The sampling parameter less the tokens of the output so far."""
    allowed_ids: Sequence[int] | None = None
    """The only tokens that may be drawn; None: all."""
    banned_ids: Sequence[int] = ()
    constraint: Constraint | None = None
    """To be sent in the engine's own form. The output begins with the request."""
    is_batch: bool = False
    num_output_ids: int = 0
    """How many of the last ``token_ids`` are output."""
    num_prompt_top: int | None = None
    """Score the tokens of the prompt, each with so many alternatives, and return no token."""

    @property
    def is_decided(self) -> bool:
        """Whether there is no choice of the next token, so that the engine need not be asked."""
        has_no_choice = self.allowed_ids is not None and len(self.allowed_ids) == 1
        return has_no_choice and self.max_tokens == 1 and self.sampling.logprobs is None


class EngineContent(NamedTuple):
    """The content of an event of an engine's stream."""

    token_ids: Sequence[int] = ()
    scores: Sequence[TokenScore | None] = ()
    """The score of each token, if logprobs are requested."""
    end: End | None = None
    """Why the engine has ended the stream."""
    prompt_scores: Sequence[TokenScore] = ()
    """The scores of the prompt from its second token on, in a single piece, if the request is for
    them."""


class EngineCall(Protocol):
    """A request in the form of a server, and the reader of its stream."""

    path: str
    body: JsonObject

    def read(self, event: JsonObject) -> EngineContent:
        """Read an event. Raises `EngineFailed` if the event makes no sense."""
        ...


def piece_of(call: EngineCall, event: JsonObject) -> EngineContent:
    """Read an event, whatever it contains. Raises `EngineFailed`."""
    try:
        return call.read(event)
    except NONSENSE as error:
        raise EngineFailed(f"The engine's event makes no sense: {error!r}") from error


class EngineFacts(NamedTuple):
    """What a server says of itself."""

    version: str
    model: str
    """A name that changes when it serves another model."""
    max_seq_len: int | None = None
    num_slots: int | None = None
    vocab_size: int | None = None


class Http(Protocol):
    """The part of a connection that adapters use for questions."""

    def get(self, path: str) -> JsonObject:
        """The answer. Raises `EngineAway`, `EngineBusy` and `EngineFailed`."""
        ...

    def post(self, path: str, body: JsonObject) -> JsonObject: ...


class Adapter(Protocol):
    traits: EngineTraits
    default_port: int
    health_path: str

    def facts(self, http: Http, names: Collection[str]) -> EngineFacts:
        """``names`` are what the served model may be called, if the server has several. Raises
        `StartupError` if it is none of them."""
        ...

    def tokenize(self, http: Http, text: str) -> list[int] | None:
        """The token ids of a text, without special tokens around it; None if the server does not
        say."""
        ...

    def call(self, ask: Ask, tokenizer: Tokenizer) -> EngineCall: ...

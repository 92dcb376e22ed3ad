"""HTTP bodies: which parameters there are, and what shape they have.

The pydantic models serve this code and the OpenAPI page. What values parameters may have stands on
the structs of `shared.messages` alone, and is checked where `gateway.api.bodies.draft` builds one.
"""

from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from gateway.api.bodies.parameters import refuse_unsupported
from gateway.api.bodies.prompts import (
    UncheckedPrompt,
    chat_prompt,
    completion_prompts,
    template_kwargs,
)
from gateway.log.context import Endpoint
from shared.errors import InvalidRequest, ModelNotFound
from shared.messages import ModelName

_DEFAULT_COMPLETION_TOKENS = 16

_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_OBJECT = {"type": "object", "additionalProperties": True}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {"description": "A string, or a list of parts of type `text`."},
        "name": {"type": "string"},
        "tool_calls": {"type": "array", "items": _CALL},
        "tool_call_id": {"type": "string"},
        "reasoning_content": {"type": "string"},
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "parameters": {**_OBJECT, "description": "A JSON schema."},
            },
        },
    },
}
_PROMPT = {
    "anyOf": [{"type": "string"}, _STRINGS, _TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS}]
}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}},
                },
            },
        },
    ]
}

Messages: TypeAlias = Annotated[list[Any], WithJsonSchema({"type": "array", "items": _MESSAGE})]
Prompts: TypeAlias = Annotated[Any, WithJsonSchema(_PROMPT)]
Strings: TypeAlias = Annotated[Any, WithJsonSchema(_STRINGS)]
Stop: TypeAlias = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS]})]
TokenIds: TypeAlias = Annotated[Any, WithJsonSchema(_TOKEN_IDS)]
Tools: TypeAlias = Annotated[list[Any] | None, WithJsonSchema({"type": "array", "items": _TOOL})]
ToolChoice: TypeAlias = Annotated[Any, WithJsonSchema(_TOOL_CHOICE)]
Biases: TypeAlias = Annotated[
    dict[str, Any] | None,
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
JsonSchema: TypeAlias = Annotated[Any, WithJsonSchema({"anyOf": [_OBJECT, {"type": "string"}]})]


def _existing(model: str) -> str:
    try:
        return msgspec.convert(model, ModelName)
    except msgspec.ValidationError:
        raise ModelNotFound(f"The model '{model[:128]}' does not exist.", param="model") from None


Model: TypeAlias = Annotated[str, AfterValidator(_existing)]
"""A name that a model may have; no other exists."""


class Body(BaseModel):
    """What all bodies share. Unknown parameters are tolerated."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def drop_unused(cls, body: Any) -> Any:
        """Client libraries send null, {} and [] for what their users left out. What is required
        keeps its empty value, and is refused for that."""
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if value is not None and (value not in ({}, []) or cls._requires(name))
        }

    @classmethod
    def _requires(cls, name: str) -> bool:
        return name in cls.model_fields and cls.model_fields[name].is_required()


class GenerationRequest(Body):
    """The parameters that chat and completions share."""

    model: Model
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 and -1: all tokens.")
    min_p: float | None = None
    seed: int | None = None
    n: int | None = Field(None, description="Answers to each prompt.")
    stop: Stop = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = Field(False, description="Go on after the model's end token, as in vLLM.")
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases = Field(None, description="By token id, from -100 to 100.")
    bad_words: Strings = None
    allowed_token_ids: TokenIds = None
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, description="As in vLLM; not with `stream`.")
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] | None = Field(
        None, description="`text`, `json_object`, or `json_schema` with a schema."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of `json`, `regex`, `choice`, `grammar`, as in vLLM."
    )
    guided_json: JsonSchema = None
    guided_regex: str | None = None
    guided_choice: Strings = None
    guided_grammar: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = Field(
        None,
        description="With `stream`: `include_usage` adds a last chunk with the usage, "
        "`continuous_usage_stats` adds it to all chunks.",
    )
    timeout: float | None = Field(
        None, gt=0, description="Seconds until the request ends with an error; Warren's own."
    )
    detach: bool = Field(
        False, description="Go on when the client leaves: it comes back later; Warren's own."
    )
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage", False))

    @property
    def continuous_usage(self) -> bool:
        wants = (self.stream_options or {}).get("continuous_usage_stats", False)
        return self.include_usage and bool(wants)


class ChatRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``."""

    endpoint: ClassVar[Endpoint] = "chat"
    echo: ClassVar[bool] = False
    best_of: ClassVar[int | None] = None

    messages: Messages
    max_completion_tokens: int | None = Field(None, description="Wins over `max_tokens`.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, description="With `logprobs`.")
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = Field(None, description="Goes to the chat template.")
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def prompts(self) -> list[UncheckedPrompt]:
        prompt = chat_prompt(self.messages)
        kwargs = template_kwargs(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        if self.continue_final_message and self.add_generation_prompt:
            name = "continue_final_message"
            raise InvalidRequest(f"{name}: not together with add_generation_prompt.", param=name)
        adds_generation_prompt = self.add_generation_prompt is not False
        return [
            prompt
            | {
                "template_kwargs": kwargs,
                "continue_final_message": self.continue_final_message,
                "add_generation_prompt": (
                    adds_generation_prompt and not self.continue_final_message
                ),
            }
        ]

    def token_limit(self) -> int | None:
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: only with logprobs.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    endpoint: ClassVar[Endpoint] = "completions"
    tools: ClassVar[list[Any] | None] = None
    tool_choice: ClassVar[Any] = None
    parallel_tool_calls: ClassVar[bool] = True
    include_reasoning: ClassVar[bool] = True

    prompt: Prompts
    logprobs: int | None = Field(None, description="Alternatives told for each token.")
    echo: bool = Field(False, description="Begin the text with the prompt.")
    best_of: int | None = Field(
        None, description="Answers drawn to each prompt; the `n` likeliest are told."
    )
    add_special_tokens: bool = True

    @field_validator("logprobs", mode="before")
    @classmethod
    def take_no_for_none(cls, logprobs: Any) -> Any:
        """Some clients send chat's ``logprobs: false``."""
        return None if logprobs is False else logprobs

    def prompts(self) -> list[UncheckedPrompt]:
        return completion_prompts(self.prompt, add_special_tokens=self.add_special_tokens)

    def token_limit(self) -> int | None:
        return _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs


_Body = TypeVar("_Body", bound=Body)
_Request = TypeVar("_Request", bound=ChatRequest | CompletionRequest)


def parse_body(kind: type[_Body], body: bytes) -> _Body:
    """Read a JSON body. Raises `InvalidRequest` and `ModelNotFound`."""
    try:
        return kind.model_validate(msgspec.json.decode(body))
    except ValidationError as error:
        raise misshapen(error) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None


def parse(kind: type[_Request], body: bytes) -> _Request:
    """Read the body of a generation. Raises `InvalidRequest`, also for what is not supported, and
    `ModelNotFound`."""
    request = parse_body(kind, body)
    refuse_unsupported(request.model_extra or {}, is_chat=request.endpoint == "chat")
    _check_stream_options(request)
    return request


def _check_stream_options(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise InvalidRequest(
            "stream_options is allowed only when stream is true.", param="stream_options"
        )
    for name in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
        if not isinstance(options.get(name, False), bool | None):
            param = f"stream_options.{name}"
            raise InvalidRequest(f"{param}: expected a boolean", param=param)


def misshapen(errors: ValidationError) -> InvalidRequest:
    """The first of pydantic's complaints."""
    error = errors.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in error["loc"])
    message = "expected an object" if error["type"] == "model_type" else error["msg"]
    return InvalidRequest(f"{param or 'body'}: {message}", param=param or None)

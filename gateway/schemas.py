"""HTTP bodies in, jobs out: `parse` gives a body its shape, `to_job` makes the job of it.

The pydantic models say which parameters exist, for this code and for the OpenAPI page. What values
they may have stands on the structs of `shared.messages` alone and is checked by building one.
"""

import re
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import ErrorDetails

from gateway.parameters import refuse_unsupported
from gateway.prompts import UncheckedPrompt, chat_prompt, completion_prompts
from shared.errors import InvalidRequest
from shared.messages import GenerationJob, SamplingParams

_DEFAULT_COMPLETION_TOKENS = 16

_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {"description": "A string, or a list of parts of type `text`."},
        "name": {"type": "string"},
    },
}
_PROMPT = {"anyOf": [{"type": "string"}, _STRINGS, _TOKEN_IDS, {"items": _TOKEN_IDS}]}

Messages: TypeAlias = Annotated[list[Any], WithJsonSchema({"type": "array", "items": _MESSAGE})]
Prompts: TypeAlias = Annotated[Any, WithJsonSchema(_PROMPT)]
Stop: TypeAlias = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS]})]


class GenerationRequest(BaseModel):
    """The parameters that both endpoints share. Unknown ones are tolerated."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 and -1: all tokens.")
    seed: int | None = None
    stop: Stop = None
    stream: bool = False
    stream_options: dict[str, Any] | None = Field(
        None, description="With `stream`; `include_usage` adds a last chunk with the usage."
    )
    user: str | None = None
    ignore_eos: bool = Field(False, description="Go on after the model's end token, as in vLLM.")

    @model_validator(mode="before")
    @classmethod
    def drop_unused(cls, body: Any) -> Any:
        """Client libraries send null, {} and [] for what their users left out."""
        if not isinstance(body, dict):
            return body
        return {k: v for k, v in body.items() if v is not None and v != {} and v != []}

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage", False))


class ChatRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, description="Wins over `max_tokens`.")

    def prompts(self) -> list[UncheckedPrompt]:
        return [chat_prompt(self.messages)]

    def token_limit(self) -> int | None:
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    prompt: Prompts

    def prompts(self) -> list[UncheckedPrompt]:
        return completion_prompts(self.prompt)

    def token_limit(self) -> int | None:
        return _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


_Request = TypeVar("_Request", bound=GenerationRequest)


def parse(kind: type[_Request], body: bytes) -> _Request:
    """Read a JSON body. Raises `InvalidRequest`, also for parameters that are not built yet."""
    try:
        request = kind.model_validate(msgspec.json.decode(body))
    except ValidationError as error:
        raise _misshapen(error.errors(include_url=False, include_input=False)[0]) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None
    refuse_unsupported(request.model_extra or {})
    _check_stream_options(request)
    return request


def to_job(
    request: ChatRequest | CompletionRequest,
    *,
    request_id: str,
    created_at: float,
    deadline: float | None = None,
    mode: Literal["stream", "final"] = "stream",
) -> GenerationJob:
    """Build the job of a request. Raises `InvalidRequest` naming what is out of its limits."""
    job = {
        "type": GenerationJob.__struct_config__.tag,
        "request_id": request_id,
        "model": request.model,
        "prompts": request.prompts(),
        "sampling": _sampling(request),
        "mode": mode,
        "created_at": created_at,
        "deadline": deadline,
    }
    try:
        return msgspec.convert(job, GenerationJob)
    except msgspec.ValidationError as error:
        raise _out_of_limits(str(error), request) from None


def _sampling(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """What the client said; `SamplingParams` has the defaults for the rest."""
    said: dict[str, Any] = {
        name: value
        for name in SamplingParams.__struct_fields__
        if (value := getattr(request, name, None)) is not None
    }
    if (limit := request.token_limit()) is not None:
        said["max_tokens"] = limit
    if request.top_k == -1:
        said["top_k"] = 0
    if isinstance(request.stop, str):
        said["stop"] = [request.stop] if request.stop else []
    return said


def _check_stream_options(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise InvalidRequest(
            "stream_options is allowed only when stream is true.", param="stream_options"
        )
    for name in ("include_usage", "continuous_usage_stats"):
        if not isinstance(options.get(name, False), bool | None):
            param = f"stream_options.{name}"
            raise InvalidRequest(f"{param}: expected a boolean", param=param)
    if options.get("continuous_usage_stats"):
        param = "stream_options.continuous_usage_stats"
        raise InvalidRequest(f"{param} is not supported.", param=param)


def _misshapen(error: ErrorDetails) -> InvalidRequest:
    param = ".".join(str(part) for part in error["loc"])
    message = "expected an object" if error["type"] == "model_type" else error["msg"]
    return InvalidRequest(f"{param or 'body'}: {message}", param=param or None)


def _out_of_limits(message: str, request: GenerationRequest) -> InvalidRequest:
    """Translate msgspec's "Expected ... - at `$.sampling.top_p`" to the client's names."""
    reason, _, path = message.partition(" - at `$.")
    path = path.rstrip("`")
    if path.startswith("sampling."):
        param = re.split(r"[.\[]", path)[1]
    elif path.startswith("prompts"):
        param = re.sub(r"^prompts(\[\d+\]\.)?", "", path)
        param = param if param.startswith("messages") else "prompt"
    else:
        param = path
    if param == "max_tokens" and getattr(request, "max_completion_tokens", None) is not None:
        param = "max_completion_tokens"
    return InvalidRequest(f"{param}: {reason[0].lower()}{reason[1:]}", param=param)

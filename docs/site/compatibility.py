"""The compatibility tables: how Warren treats every parameter of OpenAI, Anthropic and vLLM.

Their parameters come from the types of their Python packages, ours from the schemas of the bodies.
What is refused is found out by asking the schemas, so that only the notes are written by hand.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from anthropic.types import message_create_params
from openai.types import (
    batch_create_params,
    completion_create_params,
    embedding_create_params,
    upload_complete_params,
    upload_create_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from gateway.api.bodies.messages import MessagesRequest
from gateway.api.bodies.quick import EmbeddingRequest
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.bodies.schemas import Body, ChatRequest, CompletionRequest
from gateway.api.routes.batches import BatchOrder
from gateway.api.routes.uploads import UploadCompletion, UploadOrder
from shared.errors import InvalidRequest
from shared.messages import SamplingParams

_VLLM = (
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logits_processors",
    "min_p",
    "min_tokens",
    "mm_processor_kwargs",
    "priority",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_penalty",
    "request_id",
    "response_format",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "structural_tag",
    "structured_outputs",
    "thinking_token_budget",
    "top_k",
    "truncate_prompt_tokens",
    "use_beam_search",
    "vllm_xargs",
)
"""vLLM's parameters beyond OpenAI's, as its documentation lists them for both endpoints."""

NOTES: Mapping[str, str] = {
    "add_generation_prompt": "",
    "add_special_tokens": "",
    "allowed_token_ids": "",
    "background": "The response runs without its client",
    "bad_words": "",
    "best_of": "Not with `stream`, unless it equals `n`",
    "chat_template_kwargs": "Further variables of the chat template",
    "conversation": "See [Stored responses](responses.md)",
    "continue_final_message": "Not together with `add_generation_prompt`",
    "detach": "See [Resuming streams](streams.md#detach)",
    "dimensions": "",
    "echo": "",
    "encoding_format": "`float` or `base64`",
    "frequency_penalty": "",
    "function_call": "The older form of `tool_choice`: `none`, `auto`, or one function",
    "functions": "The older form of `tools`. One call in an answer",
    "guided_choice": "Older name of `structured_outputs.choice`",
    "guided_grammar": "Older name of `structured_outputs.grammar`",
    "guided_json": "Older name of `structured_outputs.json`",
    "guided_json_object": "Any JSON object",
    "guided_regex": "Older name of `structured_outputs.regex`",
    "ignore_eos": "",
    "include": "`message.output_text.logprobs`. `reasoning.encrypted_content` has no effect",
    "include_reasoning": "",
    "include_stop_str_in_output": "",
    "input": (
        "Embeddings: text or token ids. Responses: text, messages, calls and outputs, also of "
        "custom tools"
    ),
    "instructions": "",
    "logit_bias": "By token id, from -100 to 100. An id outside the vocabulary is refused",
    "logprobs": "Chat: a Boolean. Completions: a number up to 20",
    "max_completion_tokens": "Takes precedence over `max_tokens`",
    "max_output_tokens": "",
    "max_tokens": "Completions default to 16. 0 is allowed",
    "messages": "Text, and refusals of the assistant. Parts of other types are refused",
    "metadata": "Returned with the response",
    "min_p": "",
    "min_tokens": "",
    "model": "May be left out if there is one model",
    "n": "At most 128 choices for all prompts together",
    "parallel_tool_calls": "",
    "presence_penalty": "",
    "previous_response_id": "See [Stored responses](responses.md)",
    "prompt": "A string, strings, token ids, or lists of token ids",
    "prompt_logprobs": "Not with `stream`",
    "reasoning": "`effort`",
    "reasoning_effort": "Passed to the chat template",
    "repetition_penalty": "",
    "response_format": (
        "`text`, `json_object`, `json_schema`. See [Structured output](api.md#structured-output)"
    ),
    "return_tokens_as_token_ids": "",
    "seed": "The same seed gives the same tokens on any worker",
    "service_tier": "`flex` is [the batch class](batches.md#single-requests-in-the-batch-class)",
    "skip_special_tokens": "",
    "stop": "Up to 16 strings of up to 256 characters",
    "stop_token_ids": "",
    "store": "True by default. See [Stored responses](responses.md#what-is-stored)",
    "stream": "",
    "stream_options": "`include_usage`, `continuous_usage_stats`, `include_obfuscation`, which is "
    "off by default. Only with `stream`",
    "structured_outputs": "One of `json`, `regex`, `choice`, `grammar`",
    "temperature": "",
    "text": "`format`, `verbosity`",
    "timeout": "Seconds until the request ends with an error",
    "tool_choice": "`none`, `auto`, `required`, one function, or `allowed_tools`",
    "tools": "Functions. Others are left out, and named in `x-warren-ignored-tools`",
    "top_k": "0 and -1 mean all tokens",
    "top_logprobs": "Only with `logprobs`",
    "top_p": "",
    "truncation": "`auto` or `disabled`, the default. See "
    "[Long conversations](responses.md#long-conversations)",
    "verbosity": "Passed to the chat template",
}
"""What else there is to know of each supported parameter. One that is missing here is an error."""

_UNUSED = {"user"}
"""What the schemas read, and nothing else does."""
_REFUSED_HERE: Mapping[str, str] = {
    "audio": "Text only",
}


_MESSAGES_NOTES: Mapping[str, str] = {
    "cache_control": "Prefixes are always cached. Also ignored on blocks and tools",
    "max_tokens": "Required. 0 is allowed",
    "messages": "Blocks of the types `text`, `thinking`, `redacted_thinking` (left out), "
    "`tool_use`, and `tool_result`, whose `is_error` is ignored. Others are refused. A last "
    "message of the assistant is continued. A system message after the first turn becomes part "
    "of the user's",
    "metadata": "",
    "output_config": "`effort` is passed to the chat template, `format` constrains the answer",
    "stop": "Called `stop_sequences`",
    "stop_sequences": "Up to 16 strings of up to 256 characters",
    "stream_options": "The usage is always sent",
    "system": "A string or blocks. Claude Code's billing header is left out",
    "thinking": "Sets `enable_thinking` of the chat template. If it is not enabled, thoughts are "
    "left out of the answer. `budget_tokens` and `display` are ignored",
    "tool_choice": "`auto`, `any`, `tool`, `none`, with `disable_parallel_tool_use`",
    "tools": "Those of the client. Others are left out, and named in `x-warren-ignored-tools`",
}


_UPLOAD_NOTES: Mapping[str, str] = {
    "bytes": "The size of the file, up to `WARREN_MAX_FILE_BYTES`",
    "expires_after": "3600 seconds to 30 days after the completion",
    "filename": "",
    "md5": "Hexadecimal",
    "mime_type": "Any",
    "part_ids": "In the order of the file",
    "purpose": "`batch`",
}
_BATCH_NOTES: Mapping[str, str] = {
    "completion_window": "Any duration, such as `24h`, up to `14d`",
    "endpoint": "`/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`, `/v1/responses`",
    "input_file_id": "",
    "metadata": "Returned with the batch",
    "output_expires_after": "3600 seconds to 30 days after the end",
}


class Endpoint(NamedTuple):
    """A body, its origins, and how it is read."""

    path: str
    body: type[Body]
    origin: type
    """The parameters of the API that the endpoint is compatible with."""
    vllm: Sequence[str]
    api: str = "OpenAI"
    notes: Mapping[str, str] = {}
    """Those that differ from `NOTES`."""

    @property
    def parameters(self) -> set[str]:
        """The names of ours."""
        return {field.encode_name for field in msgspec.structs.fields(self.body)}


ENDPOINTS = (
    Endpoint(
        "POST /v1/chat/completions",
        ChatRequest,
        chat_create_params.CompletionCreateParamsBase,
        _VLLM,
    ),
    Endpoint(
        "POST /v1/completions",
        CompletionRequest,
        completion_create_params.CompletionCreateParamsBase,
        _VLLM,
    ),
    Endpoint(
        "POST /v1/responses",
        ResponsesRequest,
        response_create_params.ResponseCreateParamsBase,
        (),
        notes={"max_tool_calls": "Limits tools that OpenAI runs, of which there are none"},
    ),
    Endpoint(
        "POST /v1/messages",
        MessagesRequest,
        message_create_params.MessageCreateParamsBase,
        (),
        "Anthropic",
        _MESSAGES_NOTES,
    ),
    Endpoint(
        "POST /v1/embeddings",
        EmbeddingRequest,
        embedding_create_params.EmbeddingCreateParams,
        (),
    ),
    Endpoint(
        "POST /v1/uploads",
        UploadOrder,
        upload_create_params.UploadCreateParams,
        (),
        notes=_UPLOAD_NOTES,
    ),
    Endpoint(
        "POST /v1/uploads/{upload_id}/complete",
        UploadCompletion,
        upload_complete_params.UploadCompleteParams,
        (),
        notes=_UPLOAD_NOTES,
    ),
    Endpoint(
        "POST /v1/batches",
        BatchOrder,
        batch_create_params.BatchCreateParams,
        (),
        notes=_BATCH_NOTES,
    ),
)


def tables() -> str:
    """A section with a table for each endpoint, as Markdown."""
    return "\n\n".join("\n".join(_section(endpoint)) for endpoint in ENDPOINTS)


def _section(endpoint: Endpoint) -> Iterator[str]:
    yield f"## {endpoint.path}"
    yield ""
    yield "| Parameter | From | Warren | Notes |"
    yield "|---|---|---|---|"
    theirs = set(endpoint.origin.__annotations__) | {"stream"} & endpoint.parameters
    names = theirs | {*endpoint.vllm} | endpoint.parameters
    for name in sorted(names):
        origin = endpoint.api if name in theirs else "vLLM" if name in _VLLM else "Warren"
        yield f"| `{name}` | {origin} | {' | '.join(_verdict(endpoint, name))} |"


def _verdict(endpoint: Endpoint, name: str) -> tuple[str, str]:
    """What happens to a parameter, and what else there is to know of it."""
    if name in _UNUSED:
        return "ignored", ""
    try:
        endpoint.body.check_names({name: "x"})
    except InvalidRequest:
        notes = {**_REFUSED_HERE, **endpoint.notes}
        return "refused", notes.get(name, "400, except for its neutral value")
    if name in endpoint.parameters:
        note = endpoint.notes[name] if name in endpoint.notes else NOTES[name]
        return "supported", "; ".join(filter(None, [_limits(name), note]))
    return "ignored", endpoint.notes.get(name, "")


def _limits(name: str) -> str:
    """The range of a number, from the schema of the sampling parameters."""
    schemas = msgspec.json.schema(SamplingParams)["$defs"]["SamplingParams"]["properties"]
    schema = schemas.get(name, {})
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high = schema.get("maximum")
    if schema.get("type") != "number" or high is None:
        return ""
    start = f"{low:g} to" if low is not None else f"above {above:g}, up to"
    return f"{start} {high:g}"

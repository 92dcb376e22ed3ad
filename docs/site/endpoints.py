"""The operations of the API, and the parameters that other APIs have for each of them.

The parameters of OpenAI and Anthropic come from the types of their Python packages, and the
parameters of vLLM and Cohere from their documentation. Only the notes on bodies of generations are
written by hand.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import (
    batch_create_params,
    batch_list_params,
    completion_create_params,
    embedding_create_params,
    file_create_params,
    file_list_params,
    upload_complete_params,
    upload_create_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.conversations import (
    conversation_create_params,
    conversation_update_params,
    item_create_params,
    item_list_params,
)
from openai.types.responses import (
    input_item_list_params,
    input_token_count_params,
    response_create_params,
    response_retrieve_params,
)
from openai.types.uploads import part_create_params
from openai.types.webhooks import (
    webhook_create_params,
    webhook_list_params,
    webhook_rotate_secret_params,
    webhook_test_params,
    webhook_update_params,
)

from gateway.api.bodies.counting import MessageTokensRequest, ResponseTokensRequest
from gateway.api.bodies.messages import MessagesRequest
from gateway.api.bodies.parsing import Body
from gateway.api.bodies.quick import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from gateway.api.bodies.scoring import RerankRequest, ScoreRequest
from gateway.api.routes.batches import BatchOrder
from gateway.api.routes.conversations import ConversationChange, NewConversation, NewItems
from gateway.api.routes.uploads import UploadCompletion, UploadOrder
from gateway.api.routes.webhooks import NewWebhook, Rotation, TestOrder, WebhookChanges

VLLM = (
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "detokenize",
    "documents",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "guided_whitespace_pattern",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logits_processors",
    "media_io_kwargs",
    "min_p",
    "min_tokens",
    "mm_processor_kwargs",
    "priority",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_detection",
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
LLAMA_CPP = (
    "cache_prompt",
    "dry_multiplier",
    "dynatemp_range",
    "grammar",
    "json_schema",
    "mirostat",
    "n_keep",
    "n_predict",
    "n_probs",
    "post_sampling_probs",
    "samplers",
    "typical_p",
    "xtc_probability",
)
"""The parameters of llama-server that are refused, because they change answers."""

_POOLING = (
    "add_special_tokens",
    "cache_salt",
    "chat_template",
    "embed_dtype",
    "endianness",
    "mm_processor_kwargs",
    "priority",
    "request_id",
    "truncate_prompt_tokens",
    "use_activation",
    "user",
)
"""vLLM's parameters of models without generation."""
_SCORE = ("model", "text_1", "text_2", *_POOLING)
_RERANK = ("documents", "model", "query", "top_n", *_POOLING)
_COHERE_RERANK = ("max_tokens_per_doc", "rank_fields", "return_documents")
_TOKENIZE = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "messages",
    "mm_processor_kwargs",
    "model",
    "prompt",
    "return_token_strs",
    "tools",
)

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
    "echo": "",
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
    "instructions": "",
    "logit_bias": "By token id, from -100 to 100. An id outside the vocabulary is refused",
    "logprobs": "Chat: a Boolean. Completions: a number up to 20. The token that ends an answer, "
    "and the tokens of a stop string, are not among the logprobs unless they are part of the text, "
    "tokens are returned as ids, or the prompt is echoed",
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
    "reasoning_effort": "Passed to the chat template. `none` also sets `enable_thinking` to false",
    "repetition_penalty": "",
    "response_format": (
        "`text`, `json_object`, `json_schema`. See [Structured output](api.md#structured-output)"
    ),
    "return_tokens_as_token_ids": "",
    "seed": "The same seed gives the same tokens on any worker of equal numerics",
    "service_tier": "`flex` is [the batch class](batches.md#single-requests-in-the-batch-class)",
    "skip_special_tokens": "",
    "stop": "Up to 16 strings of up to 256 characters",
    "stop_token_ids": "",
    "store": "True by default. See [Stored responses](responses.md#what-is-stored)",
    "stream": "",
    "stream_options": "`include_usage`, `continuous_usage_stats`, `include_obfuscation`, which is "
    "off by default, and `each_token`, which sends every token at once. Only with `stream`",
    "structured_outputs": "One of `json`, `regex`, `choice`, `grammar`",
    "temperature": "",
    "text": "`format`, `verbosity`",
    "timeout": "Seconds until the request ends with an error",
    "tool_choice": "`none`, `auto`, `required`, one tool, or `allowed_tools`",
    "tools": "Functions and custom tools. Others are left out; `x-warren-ignored-tools` names them",
    "top_k": "0 and -1 mean all tokens",
    "top_logprobs": "Only with `logprobs`",
    "top_p": "",
    "truncation": "`auto` or `disabled`, the default. See "
    "[Long conversations](responses.md#long-conversations)",
    "verbosity": "Passed to the chat template",
}
"""What else there is to know of the parameters of generations."""


_MESSAGES_NOTES: Mapping[str, str] = {
    "cache_control": "Prefixes are always cached. Also ignored on blocks and tools",
    "max_tokens": "Required. 0 is allowed",
    "messages": "Blocks of the types `text`, `thinking`, `redacted_thinking` (left out), "
    "`tool_use`, and `tool_result`, whose `is_error` is ignored. Others are refused. A last "
    "message of the assistant is continued. A system message after the first turn becomes part "
    "of the user's",
    "metadata": "",
    "output_config": "`effort` is passed to the chat template, `format` constrains the answer",
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
_FILE_NOTES: Mapping[str, str] = {
    "expires_after": "3600 seconds to 30 days after the upload",
    "file": "Up to `WARREN_MAX_FILE_BYTES`",
    "purpose": "`batch`",
}
_CONVERSATION_NOTES: Mapping[str, str] = {
    "items": "Up to 20 messages, calls, their outputs, and reasoning",
    "metadata": "Up to 16 pairs of strings. Replaces what was there",
}
_QUICK_NOTES: Mapping[str, str] = {
    "add_generation_prompt": "True by default",
    "add_special_tokens": "True by default. Only with `prompt`",
    "continue_final_message": "Takes precedence over `add_generation_prompt`",
    "documents": "Texts, or objects with a `text`",
    "encoding_format": "`float` or `base64`",
    "input": "A text, token ids, or a list of either",
    "messages": "As in a chat. Either these or `prompt`",
    "model": "May be left out if there is one model",
    "prompt": "A text. Either this or `messages`",
    "query": "A text",
    "return_documents": "True by default",
    "return_token_strs": "Also return each token as a string",
    "text_1": "A text, or as many texts as `text_2`",
    "text_2": "A text or texts",
    "tokens": "Token ids",
    "tools": "As in a chat",
    "top_n": "0, the default: all documents",
    "use_activation": "A score is a cosine",
}
_COUNTING_NOTES: Mapping[str, str] = {
    "messages": "As in `POST /v1/messages`",
    "output_config": "`effort`",
    "text": "`verbosity`",
    "thinking": "Sets `enable_thinking` of the chat template",
    "tool_choice": "`none` leaves out the tools",
}
_PROMPT_OF_MESSAGE = (
    "chat_template_kwargs",
    "messages",
    "model",
    "output_config",
    "system",
    "thinking",
    "tool_choice",
    "tools",
)
_PROMPT_OF_RESPONSE = (
    "add_generation_prompt",
    "chat_template_kwargs",
    "continue_final_message",
    "conversation",
    "input",
    "instructions",
    "model",
    "previous_response_id",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
)
"""What the prompt is made of."""
_RESPONSES_NOTES: Mapping[str, str] = {
    "max_tool_calls": "Limits tools that OpenAI runs, of which there are none",
    "input": "Text, messages, reasoning, calls and outputs, also of custom tools, and "
    "[references](responses.md#references)",
    "max_tokens": "Another name of `max_output_tokens`",
}


class Endpoint(NamedTuple):
    """An operation, and where its parameters come from."""

    operation: str
    """Its method and its path in the OpenAPI document."""
    origin: type | Collection[str] = ()
    """The parameters of the API that it is compatible with: a `TypedDict`, or their names."""
    api: str = "OpenAI"
    """The name of that API."""
    body: type[Body] | None = None
    """The struct that reads a body of JSON."""
    others: Mapping[str, Collection[str]] = {}
    """Further parameters, by the name of their API."""
    in_effect: Collection[str] | None = None
    """The only parameters that have an effect; None: all that the body has."""
    without_effect: Collection[str] = ()
    """Parameters that the body has only because others have them."""
    notes: Mapping[str, str] = {}
    """The descriptions that differ from `NOTES` or from the OpenAPI document."""

    @property
    def origins(self) -> dict[str, str]:
        """The API that each parameter of others comes from."""
        is_type = isinstance(self.origin, type)
        names: Any = self.origin.__annotations__ if is_type else self.origin
        others = {name: api for api, named in self.others.items() for name in named}
        return others | dict.fromkeys(names, self.api)


_FULL = {"vLLM": VLLM}
ENDPOINTS = (
    Endpoint(
        "POST /v1/chat/completions",
        chat_create_params.CompletionCreateParamsStreaming,
        body=ChatRequest,
        others=_FULL,
    ),
    Endpoint(
        "POST /v1/completions",
        completion_create_params.CompletionCreateParamsStreaming,
        body=CompletionRequest,
        others=_FULL,
    ),
    Endpoint(
        "POST /v1/responses",
        response_create_params.ResponseCreateParamsStreaming,
        body=ResponsesRequest,
        notes=_RESPONSES_NOTES,
    ),
    Endpoint("GET /v1/responses", api="Warren"),
    Endpoint(
        "GET /v1/responses/{response_id}",
        response_retrieve_params.ResponseRetrieveParamsStreaming,
        notes={"include": "The response has what was asked for when it was created"},
    ),
    Endpoint("DELETE /v1/responses/{response_id}"),
    Endpoint("POST /v1/responses/{response_id}/cancel"),
    Endpoint(
        "GET /v1/responses/{response_id}/input_items", input_item_list_params.InputItemListParams
    ),
    Endpoint(
        "POST /v1/responses/input_tokens",
        input_token_count_params.InputTokenCountParams,
        body=ResponseTokensRequest,
        in_effect=_PROMPT_OF_RESPONSE,
        notes={**_RESPONSES_NOTES, **_COUNTING_NOTES},
    ),
    Endpoint(
        "POST /v1/conversations",
        conversation_create_params.ConversationCreateParams,
        body=NewConversation,
        notes=_CONVERSATION_NOTES,
    ),
    Endpoint("GET /v1/conversations/{conversation_id}"),
    Endpoint(
        "POST /v1/conversations/{conversation_id}",
        conversation_update_params.ConversationUpdateParams,
        body=ConversationChange,
        notes=_CONVERSATION_NOTES,
    ),
    Endpoint("DELETE /v1/conversations/{conversation_id}"),
    Endpoint(
        "POST /v1/conversations/{conversation_id}/items",
        item_create_params.ItemCreateParams,
        body=NewItems,
        notes=_CONVERSATION_NOTES,
    ),
    Endpoint(
        "GET /v1/conversations/{conversation_id}/items",
        item_list_params.ItemListParams,
    ),
    Endpoint("GET /v1/conversations/{conversation_id}/items/{item_id}", ("include",)),
    Endpoint("DELETE /v1/conversations/{conversation_id}/items/{item_id}"),
    Endpoint(
        "POST /v1/messages",
        message_create_params.MessageCreateParamsStreaming,
        "Anthropic",
        MessagesRequest,
        without_effect=("return_tokens_as_token_ids",),  # there are no logprobs
        notes=_MESSAGES_NOTES,
    ),
    Endpoint(
        "POST /v1/messages/count_tokens",
        message_count_tokens_params.MessageCountTokensParams,
        "Anthropic",
        MessageTokensRequest,
        in_effect=_PROMPT_OF_MESSAGE,
        notes={**_MESSAGES_NOTES, **_COUNTING_NOTES},
    ),
    Endpoint(
        "POST /v1/embeddings",
        embedding_create_params.EmbeddingCreateParams,
        body=EmbeddingRequest,
        others={"vLLM": (*_POOLING, "normalize")},
        notes=_QUICK_NOTES,
    ),
    Endpoint("POST /v1/score", _SCORE, "vLLM", ScoreRequest, notes=_QUICK_NOTES),
    Endpoint(
        "POST /v1/rerank",
        _RERANK,
        "vLLM",
        RerankRequest,
        {"Cohere": _COHERE_RERANK},
        notes=_QUICK_NOTES,
    ),
    Endpoint("POST /tokenize", _TOKENIZE, "vLLM", TokenizeRequest, notes=_QUICK_NOTES),
    Endpoint(
        "POST /detokenize",
        ("model", "tokens"),
        "vLLM",
        DetokenizeRequest,
        notes=_QUICK_NOTES,
    ),
    Endpoint("GET /v1/models"),
    Endpoint("GET /v1/models/{model}"),
    Endpoint("POST /v1/files", file_create_params.FileCreateParams, notes=_FILE_NOTES),
    Endpoint("GET /v1/files", file_list_params.FileListParams),
    Endpoint("GET /v1/files/{file_id}"),
    Endpoint("GET /v1/files/{file_id}/content"),
    Endpoint("DELETE /v1/files/{file_id}"),
    Endpoint(
        "POST /v1/uploads",
        upload_create_params.UploadCreateParams,
        body=UploadOrder,
        notes=_UPLOAD_NOTES,
    ),
    Endpoint(
        "POST /v1/uploads/{upload_id}/parts",
        part_create_params.PartCreateParams,
        notes=_UPLOAD_NOTES,
    ),
    Endpoint(
        "POST /v1/uploads/{upload_id}/complete",
        upload_complete_params.UploadCompleteParams,
        body=UploadCompletion,
        notes=_UPLOAD_NOTES,
    ),
    Endpoint("POST /v1/uploads/{upload_id}/cancel"),
    Endpoint(
        "POST /v1/batches",
        batch_create_params.BatchCreateParams,
        body=BatchOrder,
        notes=_BATCH_NOTES,
    ),
    Endpoint("GET /v1/batches", batch_list_params.BatchListParams),
    Endpoint("GET /v1/batches/{batch_id}"),
    Endpoint("POST /v1/batches/{batch_id}/cancel"),
    Endpoint(
        "POST /admin/v1/webhooks",
        webhook_create_params.WebhookCreateParams,
        body=NewWebhook,
    ),
    Endpoint(
        "GET /admin/v1/webhooks",
        webhook_list_params.WebhookListParams,
        notes={"after": "There is one page", "limit": "There is one page"},
    ),
    Endpoint("GET /admin/v1/webhooks/{webhook_id}"),
    Endpoint(
        "POST /admin/v1/webhooks/{webhook_id}",
        webhook_update_params.WebhookUpdateParams,
        body=WebhookChanges,
    ),
    Endpoint("DELETE /admin/v1/webhooks/{webhook_id}"),
    Endpoint(
        "POST /admin/v1/webhooks/{webhook_id}/rotate_secret",
        webhook_rotate_secret_params.WebhookRotateSecretParams,
        body=Rotation,
    ),
    Endpoint(
        "POST /admin/v1/webhooks/{webhook_id}/test",
        webhook_test_params.WebhookTestParams,
        body=TestOrder,
    ),
    Endpoint("GET /admin/v1/webhooks/dead", api="Warren"),
    Endpoint("POST /admin/v1/webhooks/dead/{delivery_id}/retry", api="Warren"),
    Endpoint("GET /v1/usage", api="Warren"),
    Endpoint("GET /admin/v1/usage", api="Warren"),
    Endpoint("DELETE /admin/v1/usage", api="Warren"),
    Endpoint("GET /v1/streams/{stream_id}", api="Warren"),
    Endpoint("DELETE /v1/streams/{stream_id}", api="Warren"),
    Endpoint("GET /v1/streams/{stream_id}/receipt", api="Warren"),
    Endpoint("POST /v1/streams/{stream_id}/fork", api="Warren"),
    Endpoint("POST /v1/replays", api="Warren"),
    Endpoint("GET /.well-known/jwks.json", api="Warren"),
)
"""All of the API, except for what only operators and probes use."""

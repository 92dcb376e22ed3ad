"""HTTP body -> job: what is taken, what is refused, and which parameter is blamed."""

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from gateway.api.bodies import parsing
from gateway.api.bodies.parsing import parse
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from gateway.api.bodies.submission import submission
from gateway.api.render.formats import call_id
from shared.errors import InvalidRequest, ModelNotFound
from shared.messages import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    Announcement,
    ChatMessage,
    ChatPrompt,
    GenerationJob,
    ReasoningSwitch,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    decode_job,
    encode,
)

SERVED = Announcement(
    worker="w",
    model="m",
    vocab_size=100,
    max_seq_len=2048,
    fingerprint="f",
    max_num_seqs=8,
    tool_parser="hermes",
)
USER = {"role": "user", "content": "x"}


def job_of(kind: type[ChatRequest | CompletionRequest], **body: Any) -> GenerationJob:
    request = parse(kind, msgspec.json.encode({"model": "m", **body}))
    return submission(request, request_id="r", created_at=1.0, served=SERVED).job


def chat_job(*messages: Any, **more: Any) -> GenerationJob:
    return job_of(ChatRequest, messages=list(messages) or [USER], **more)


def blamed(kind: type[ChatRequest | CompletionRequest], **body: Any) -> str | None:
    """The parameter that the refusal names, which its message begins with."""
    with pytest.raises(InvalidRequest) as caught:
        job_of(kind, **body)
    assert caught.value.message.startswith(caught.value.param or "")
    return caught.value.param


@pytest.mark.parametrize(
    "answer",
    [
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": None, "refusal": "No."},
    ],
)
def test_what_the_assistant_refused_is_what_it_said(answer: dict[str, Any]) -> None:
    job = chat_job(USER, {"role": "assistant", **answer}, USER)

    (prompt,) = job.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1].content == "No."


def test_a_user_refuses_nothing() -> None:
    part = {"type": "refusal", "refusal": "No."}

    assert blamed(ChatRequest, messages=[{"role": "user", "content": [part]}]) == (
        "messages[0].content[0]"
    )


def test_verbosity_is_passed_to_the_template() -> None:
    (prompt,) = chat_job(verbosity="low").prompts

    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {"verbosity": "low"}


def test_a_bare_request_has_the_structs_defaults() -> None:
    job = chat_job()

    assert job.sampling == SamplingParams()
    assert job.mode == "stream"
    assert job.prompts == (ChatPrompt(messages=(ChatMessage(role="user", content="x"),)),)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_stream_may_have_each_token_at_once(*, is_wanted: bool) -> None:
    job = chat_job(stream=True, stream_options={"each_token": is_wanted})

    assert job.each_token is is_wanted


def test_a_job_survives_the_wire() -> None:
    job = chat_job(temperature=0.5, stop="a", max_tokens=3)

    assert decode_job(encode(job)) == job


@pytest.mark.parametrize(
    ("body", "name", "value"),
    [
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, "max_tokens", 6),
        ({"max_completion_tokens": 0}, "max_tokens", 0),
        ({"temperature": 0}, "temperature", 0.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 0}, "top_k", 0),
        ({"top_k": 5}, "top_k", 5),
        ({"stop": "a"}, "stop", ("a",)),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop": ""}, "stop", ()),
        ({"stop": {}}, "stop", ()),
        ({"seed": None}, "seed", None),
        ({"seed": -1}, "seed", -1),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"repetition_penalty": 1.1}, "repetition_penalty", 1.1),
        ({"presence_penalty": -1}, "presence_penalty", -1.0),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"logit_bias": {"7": -100, "8": 1.5}}, "logit_bias", {7: -100.0, 8: 1.5}),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"stop_token_ids": [1, 2]}, "stop_token_ids", (1, 2)),
        ({"bad_words": ["a b"]}, "bad_words", ("a b",)),
        ({"allowed_token_ids": [3]}, "allowed_token_ids", (3,)),
        ({"include_stop_str_in_output": True}, "include_stop_in_output", True),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 5}, "logprobs", 5),
        ({"prompt_logprobs": 2}, "prompt_logprobs", 2),
    ],
)
def test_parameters_become_sampling(body: dict[str, Any], name: str, value: object) -> None:
    assert getattr(chat_job(**body).sampling, name) == value


@pytest.mark.parametrize(("parser", "skips"), [(None, True), ("qwen3", True), ("gemma4", False)])
def test_a_thought_is_found_by_its_special_tokens(parser: str | None, skips: bool) -> None:
    served = msgspec.structs.replace(SERVED, reasoning_parser=parser)
    request = parse(ChatRequest, msgspec.json.encode({"model": "m", "messages": [USER]}))

    job = submission(request, request_id="r", created_at=1.0, served=served).job

    assert job.sampling.skip_special_tokens is skips


CALLED = {
    "role": "assistant",
    "tool_calls": [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for id_, name in (("call_1", "f"), ("call_2", "g"))
    ],
}


@pytest.mark.parametrize(
    ("parser", "ids"),
    [
        ("hermes", ["call_1", "call_2", "call_2", "call_1", "call_1", "call_2", "call_1"]),
        (
            "kimi_k2",
            [
                *("functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0"),
                *("functions.f:2", "functions.g:3", "functions.f:2"),
            ],
        ),
    ],
)
def test_kimis_earlier_calls_are_named_by_their_ids(parser: str, ids: list[str]) -> None:
    served = msgspec.structs.replace(SERVED, tool_parser=parser)
    results = [{"role": "tool", "tool_call_id": f"call_{k}", "content": "x"} for k in (2, 1)]
    body = {"model": "m", "messages": [USER, CALLED, *results, CALLED, results[1]]}
    request = parse(ChatRequest, msgspec.json.encode(body))

    job = submission(request, request_id="r", created_at=1.0, served=served).job

    prompt = job.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    written: list[str | None] = []
    for message in prompt.messages[1:]:
        written += [call.id for call in message.tool_calls] or [message.tool_call_id]
    assert written == ids


def test_kimis_calls_are_numbered_through_the_conversation() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    served = msgspec.structs.replace(SERVED, tool_parser="kimi_k2")
    body = {"model": "m", "messages": [USER, CALLED], "tools": [tool]}
    request = parse(ChatRequest, msgspec.json.encode(body))

    rendering = submission(request, request_id="r", created_at=1.0, served=served).rendering

    assert call_id(rendering, 0, 0, "f") == "functions.f:2"
    assert call_id(rendering, 0, 1, "g") == "functions.g:3"
    messages = msgspec.structs.replace(rendering, endpoint="messages")
    assert call_id(messages, 0, 0, "f").startswith("toolu_")


def limits_of(kind: type[msgspec.Struct], name: str) -> inspect.Type:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    limits = next(field.type for field in info.fields if field.name == name)
    return limits.type if isinstance(limits, inspect.Metadata) else limits


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_a_body_has_the_limits_of_sampling(kind: type[msgspec.Struct]) -> None:
    shared = {*kind.__struct_fields__} & {*SamplingParams.__struct_fields__}
    reworded = {"logprobs", "prompt_logprobs", "stop", "top_k"}

    for name in shared - reworded:
        assert limits_of(kind, name) == limits_of(SamplingParams, name), name


def test_a_completion_has_16_tokens_unless_it_says_otherwise() -> None:
    limits = [
        job_of(CompletionRequest, prompt="x", **body).sampling.max_tokens
        for body in ({}, {"max_tokens": None}, {"max_tokens": 0})
    ]

    assert limits == [16, 16, 0]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", (TextPrompt(text="a"),)),
        (["a", "b"], (TextPrompt(text="a"), TextPrompt(text="b"))),
        ([1, 2], (TokenPrompt(token_ids=(1, 2)),)),
        ([[1], [2]], (TokenPrompt(token_ids=(1,)), TokenPrompt(token_ids=(2,)))),
    ],
)
def test_prompts_come_in_four_shapes(prompt: Any, prompts: tuple[object, ...]) -> None:
    assert job_of(CompletionRequest, prompt=prompt).prompts == prompts


def test_text_parts_are_joined_and_can_be_distinguished() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]

    job = chat_job({"role": "user", "content": parts})

    message = ChatMessage(role="user", content="a\nbc", part_chars=(1, 2))
    assert job.prompts == (ChatPrompt(messages=(message,)),)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_all_roles_are_taken(role: str) -> None:
    chat_job({"role": role, "content": "x", "tool_call_id": "1", "name": "n", "tool_calls": []})


def test_an_assistant_may_have_said_nothing() -> None:
    chat_job({"role": "assistant", "content": None}, USER)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"model": 3}, "model"),
        ({"user": 3}, "user"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 3}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": 3}},
            "stream_options.include_usage",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
            "stream_options.continuous_usage_stats",
        ),
        (
            {"stream": True, "stream_options": {"each_token": 1}},
            "stream_options.each_token",
        ),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"logit_bias": {str(k): 1 for k in range(1025)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"allowed_token_ids": [100]}, "allowed_token_ids"),
        ({"allowed_token_ids": "all"}, "allowed_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 20, "n": 128}, "logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"detach": 1}, "detach"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"a": [2**64]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": -(2**63) - 1}}, "chat_template_kwargs"),
    ],
)
def test_a_bad_value_is_blamed_on_its_parameter(body: dict[str, Any], param: str) -> None:
    assert blamed(ChatRequest, **{"messages": [USER], **body}) == param


@pytest.mark.parametrize(
    ("prompt", "n"),
    [("x" * 32_769, 128), ([1] * 2_049, 128), (["x" * 65_537] * 64, 1)],
)
def test_choices_may_repeat_a_limited_part_of_their_prompts(prompt: Any, n: int) -> None:
    assert blamed(CompletionRequest, prompt=prompt, n=n, echo=True) == "echo"
    assert job_of(CompletionRequest, prompt=prompt, n=n).num_choices == n


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "alien", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([USER] * (MAX_MESSAGES + 1), "messages"),
    ],
)
def test_a_bad_message_is_named(messages: Any, param: str) -> None:
    assert blamed(ChatRequest, messages=messages) == param


@pytest.mark.parametrize(
    ("kind", "name"), [(ChatRequest, "messages"), (CompletionRequest, "prompt")]
)
def test_an_empty_list_is_said_to_be_too_short(
    kind: type[ChatRequest | CompletionRequest], name: str
) -> None:
    with pytest.raises(InvalidRequest, match="length >= 1"):
        job_of(kind, **{name: []})


@pytest.mark.parametrize("model", ["a b", "../etc", "x" * 129])
def test_a_name_that_no_model_has_is_not_found(model: str) -> None:
    with pytest.raises(ModelNotFound, match="does not exist") as caught:
        chat_job(model=model)

    assert caught.value.param == "model"


def test_parts_that_are_not_text_are_refused_by_name() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}

    with pytest.raises(InvalidRequest, match="image_url"):
        chat_job({"role": "user", "content": [part]})


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], 3, {"a": 1}, [True], [1, "a"], ["a", 1], ["a"] * (MAX_PROMPTS + 1)]
)
def test_a_bad_prompt_is_named(prompt: Any) -> None:
    assert blamed(CompletionRequest, prompt=prompt) == "prompt"


@pytest.mark.parametrize("name", sorted(parsing.NEUTRAL))
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_what_is_not_supported_is_refused_by_name(
    kind: type[ChatRequest | CompletionRequest], name: str
) -> None:
    prompt: dict[str, Any] = {"messages": [USER]} if kind is ChatRequest else {"prompt": "x"}

    assert blamed(kind, **prompt, **{name: "something"}) == name


@pytest.mark.parametrize("body", [{"echo": True}, {"best_of": 2}, {"add_special_tokens": True}])
def test_a_chat_has_no_parameters_of_completions(body: dict[str, Any]) -> None:
    assert blamed(ChatRequest, messages=[USER], **body) == next(iter(body))


@pytest.mark.parametrize(
    "body", [{"tools": [{"type": "function"}]}, {"top_logprobs": 3}, {"tool_choice": "required"}]
)
def test_a_completion_has_no_parameters_of_chats(body: dict[str, Any]) -> None:
    assert blamed(CompletionRequest, prompt="x", **body) == next(iter(body))


@pytest.mark.parametrize(
    "body",
    [
        {"n": 1, "best_of": 1, "priority": 0},
        {"logprobs": False, "top_logprobs": 0, "echo": False},
        {"tools": [], "tool_choice": "auto", "functions": None},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0, "min_p": 0},
        {"repetition_penalty": 1.0, "suffix": "", "stream_options": {}},
        {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "user": "me"},
        {"parallel_tool_calls": True, "prompt_cache_key": "k", "safety_identifier": "s"},
        {"from_the_future": {"x": 1}},
    ],
)
def test_what_asks_for_nothing_is_taken(body: dict[str, Any]) -> None:
    assert chat_job(**body).sampling == SamplingParams()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"NaN",
        b"[" * 100_000,
        b'"\\ud800"',
        b'{"model": "m", "seed": ' + b"1" * 10_000 + b"}",
    ],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(ChatRequest, body)


@pytest.mark.parametrize("body", [b"3", b"[]", b"null", b'"x"'])
def test_a_body_is_an_object(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="object"):
        parse(ChatRequest, body)


def test_a_huge_list_is_refused_without_reading_it_all() -> None:
    """An error for each of a million items would hold up the event loop for seconds."""
    assert blamed(CompletionRequest, prompt=["a"] * 1_000_000) == "prompt"


@pytest.mark.parametrize(
    ("fields", "parser"),
    [
        ({}, "deepseek_r1"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "deepseek_r1"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "qwen3"),
        ({"reasoning_effort": "none"}, "qwen3"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "deepseek_r1",
        ),
    ],
)
def test_a_variable_of_the_template_switches_the_form_of_thoughts(
    fields: dict[str, Any], parser: str
) -> None:
    body = {"model": "m", "messages": [USER], **fields}
    switch = ReasoningSwitch(variable="enable_thinking", value=False, parser="qwen3")
    served = msgspec.structs.replace(
        SERVED, reasoning_parser="deepseek_r1", reasoning_switches=(switch,)
    )

    made = submission(
        parse(ChatRequest, msgspec.json.encode(body)), request_id="r", created_at=1.0, served=served
    )

    assert made.rendering.reasoning_parser == parser


@pytest.mark.parametrize(
    ("answer", "fields", "parser"),
    [
        (None, {}, "deepseek_r1"),
        (None, {"add_generation_prompt": False}, "qwen3"),
        ("The capital is", {"continue_final_message": True}, "qwen3"),
        ("<think>Hm.</think>It is", {"continue_final_message": True}, "qwen3"),
        ("<think>Hm", {"continue_final_message": True}, "deepseek_r1"),
    ],
)
def test_a_prompt_that_goes_on_with_an_answer_has_no_thought_open(
    answer: str | None, fields: dict[str, bool], parser: str
) -> None:
    messages = [USER, *([{"role": "assistant", "content": answer}] if answer else [])]
    if "continue_final_message" in fields:
        fields = {**fields, "add_generation_prompt": False}
    body = {"model": "m", "messages": messages, **fields}
    served = msgspec.structs.replace(SERVED, reasoning_parser="deepseek_r1")

    made = submission(
        parse(ChatRequest, msgspec.json.encode(body)), request_id="r", created_at=1.0, served=served
    )

    assert made.rendering.reasoning_parser == parser

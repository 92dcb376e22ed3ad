"""Conversations that exceed the model's context: ``truncation: auto`` of the Responses API."""

import asyncio
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.truncation import beginning_at, possible_starts
from shared.messages import ChatMessage, ChatPrompt, Failed, Tokenized, ToolCall
from shared.messages.fields import Role
from tests.support.gateway.http import LiveGateway
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker

SYSTEM = {"role": "system", "content": "s"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(name: str) -> list[dict[str, Any]]:
    """A call and its output."""
    return [
        {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": name, "output": name},
    ]


def sent_to(worker: ScriptedWorker) -> list[str]:
    """The content of the messages of the last job, and the ids of their calls."""
    (prompt,) = worker.jobs[-1].job.prompts
    assert isinstance(prompt, ChatPrompt)
    return [m.content or " ".join(one.id for one in m.tool_calls) for m in prompt.messages]


@pytest.fixture
def counted(worker: ScriptedWorker) -> list[int]:
    """The lengths that were counted. A message is a token, and ten fit the model's context."""
    lengths: list[int] = []

    def count(job: Any) -> Tokenized:
        lengths.append(len(job.prompt.messages))
        ids = tuple(range(lengths[-1]))
        return Tokenized(request_id=job.request_id, token_ids=ids, tokens=(), max_seq_len=10)

    worker.quick_script = count
    return lengths


async def test_the_oldest_turns_are_left_out(
    gateway: LiveGateway, worker: ScriptedWorker, counted: list[int]
) -> None:
    items: Any = [one for k in range(100) for one in (user(f"q{k}"), assistant(f"a{k}"))]
    items.append(user("last"))

    response = await gateway.openai.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=items,
        max_output_tokens=4,
        truncation="auto",
    )

    assert sent_to(worker) == ["Be brief.", "q98", "a98", "q99", "a99", "last"]
    assert (response.output_text, response.truncation) == ("last", "auto")
    assert counted[0] == 202
    assert len(counted) <= 1 + 7


@pytest.mark.parametrize("max_output_tokens", [None, 1])
async def test_a_conversation_that_fits_stays_whole(
    gateway: LiveGateway,
    worker: ScriptedWorker,
    counted: list[int],
    max_output_tokens: int | None,
) -> None:
    items = [user("q"), assistant("a")] * 4 + [user("last")]

    await gateway.post(
        "/v1/responses",
        model=MODEL,
        input=items,
        truncation="auto",
        max_output_tokens=max_output_tokens,
    )

    assert sent_to(worker) == ["q", "a"] * 4 + ["last"]
    assert counted == [9]


@pytest.mark.parametrize("given_as", [{}, {"truncation": "disabled"}, {"truncation": None}])
async def test_nothing_is_left_out_unless_it_is_asked_for(
    gateway: LiveGateway, worker: ScriptedWorker, counted: list[int], given_as: dict[str, Any]
) -> None:
    items = [user("q"), assistant("a")] * 9 + [user("last")]

    response = await gateway.post("/v1/responses", model=MODEL, input=items, **given_as)

    assert len(sent_to(worker)) == 19
    assert response.json()["truncation"] == "disabled"
    assert counted == []


async def test_of_a_long_turn_the_oldest_calls_are_left_out_with_their_outputs(
    gateway: LiveGateway, worker: ScriptedWorker, counted: list[int]
) -> None:
    calls = [one for k in range(20) for one in call(f"c{k}")]
    earlier = [user("earlier"), assistant("answer")]

    await gateway.post(
        "/v1/responses",
        model=MODEL,
        input=[SYSTEM, *earlier, user("task"), *calls],
        truncation="auto",
        max_output_tokens=3,
    )

    assert sent_to(worker) == ["s", "task", "c18", "c18", "c19", "c19"]


async def test_what_cannot_be_shortened_is_refused_by_the_worker(
    gateway: LiveGateway, worker: ScriptedWorker, counted: list[int]
) -> None:
    items = [user("q"), assistant("a"), *[SYSTEM] * 20, user("last")]

    await gateway.post("/v1/responses", model=MODEL, input=items, truncation="auto")

    assert sent_to(worker) == ["s"] * 20 + ["last"]


async def test_a_text_is_not_counted(
    gateway: LiveGateway, worker: ScriptedWorker, counted: list[int]
) -> None:
    await gateway.post("/v1/responses", model=MODEL, input="one", truncation="auto")

    assert (sent_to(worker), counted) == (["one"], [])


@pytest.mark.parametrize("code", ["invalid_request", "context_length_exceeded"])
async def test_what_is_too_long_to_be_counted_is_shortened(
    code: str, gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    def count(job: Any) -> Tokenized | Failed:
        if len(job.prompt.messages) > 3:
            return Failed(code=code, message="Too long.", param="messages")
        return Tokenized(request_id=job.request_id, token_ids=(1,), tokens=(), max_seq_len=2)

    worker.quick_script = count

    await gateway.post(
        "/v1/responses",
        model=MODEL,
        input=[user("q"), assistant("a")] * 3 + [user("last")],
        truncation="auto",
    )

    assert sent_to(worker) == ["q", "a", "last"]


async def test_the_id_of_a_log_is_not_sent_to_a_client_whose_request_does_not_use_it(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.quick_script = lambda job: Failed(code="rate_limit_exceeded", message="Busy.")
    items = [user("q"), assistant("a"), user("last")]
    await gateway.post("/v1/responses", model=MODEL, input="one")
    await asyncio.sleep(0.3)  # in which spare logs are declared

    refused = await gateway.post("/v1/responses", model=MODEL, input=items, truncation="auto")
    begun = [await gateway.post("/v1/responses", model=MODEL, input="one") for _ in range(10)]

    assert refused.status_code == 429
    assert refused.headers["x-request-id"] not in [one.headers["x-request-id"] for one in begun]


async def test_a_worker_that_cannot_count_is_reported(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    worker.quick_script = lambda job: Failed(code="rate_limit_exceeded", message="Busy.")

    response = await gateway.post(
        "/v1/responses",
        model=MODEL,
        input=[user("q"), assistant("a"), user("last")],
        truncation="auto",
    )

    assert (response.status_code, response.json()["error"]["message"]) == (429, "Busy.")
    assert worker.jobs == []


async def test_a_background_request_does_not_wait_for_a_count_as_long_as_for_its_answer(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    deadlines: list[float] = []

    def count(job: Any) -> Tokenized:
        deadlines.append(job.deadline)
        return Tokenized(request_id=job.request_id, token_ids=(), tokens=(), max_seq_len=9)

    worker.quick_script = count

    response = await gateway.post(
        "/v1/responses",
        model=MODEL,
        input=[user("q"), assistant("a"), user("last")],
        truncation="auto",
        background=True,
    )

    assert response.json()["status"] == "queued"
    await worker.wait_until(lambda: bool(worker.jobs))
    assert worker.jobs[0].job.deadline is not None
    assert deadlines[0] < worker.jobs[0].job.deadline


async def test_what_is_stored_stays_whole(
    gateway: LiveGateway, worker: ScriptedWorker, counted: list[int]
) -> None:
    items: Any = [user("q"), assistant("a")] * 6 + [user("one")]
    create = gateway.openai.responses.create
    first = await create(model=MODEL, input=items, truncation="auto")

    second = await create(
        model=MODEL, input="two", previous_response_id=first.id, truncation="auto"
    )

    assert sent_to(worker) == [*["q", "a"] * 3, "one", "one", "two"]
    page = await gateway.openai.responses.input_items.list(second.id, limit=100)
    assert len(page.data) == 15


messages = st.lists(
    st.one_of(
        st.sampled_from(get_args(Role)).map(lambda role: ChatMessage(role=role, content="x")),
        st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(
            lambda ids: ChatMessage(
                role="assistant",
                tool_calls=tuple(ToolCall(id=one, name="f", arguments="{}") for one in ids),
            )
        ),
        st.sampled_from("abc").map(lambda one: ChatMessage(role="tool", tool_call_id=one)),
    ),
    max_size=12,
)


def num_orphans(chat: tuple[ChatMessage, ...]) -> int:
    """The outputs without a call before them."""
    called: set[str | None] = set()
    orphans = 0
    for message in chat:
        orphans += message.role == "tool" and message.tool_call_id not in called
        called.update(one.id for one in message.tool_calls)
    return orphans


@settings(deadline=None)
@given(messages=messages)
def test_a_shorter_chat_keeps_its_instructions_its_question_and_its_calls(
    messages: list[ChatMessage],
) -> None:
    starts = possible_starts(messages)
    chats = [beginning_at(start, messages) for start in starts]

    lengths = [len(messages), *map(len, chats)]
    assert lengths == sorted(set(lengths), reverse=True)
    questions = [one for one in messages if one.role == "user"]
    for start, chat in zip(starts, chats, strict=True):
        left = len(chat) - (len(messages) - start)
        assert all(one.role in ("system", "developer", "user") for one in chat[:left])
        for role in ("system", "developer"):
            assert sum(one.role == role for one in chat) == sum(m.role == role for m in messages)
        assert not questions or questions[-1] in chat
        assert num_orphans(chat) <= num_orphans(tuple(messages))

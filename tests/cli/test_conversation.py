"""The terminal's conversation, with a server that gives prepared answers."""

import io
import json
from collections.abc import Callable
from contextlib import closing

import httpx
import pytest
from rich.console import Console

from cli.conversation import Conversation, connect, converse, first_model, show_answer
from shared.errors import ContextLengthExceeded, InternalError, StartupError, WorkerLost

Handler = Callable[[httpx.Request], httpx.Response]
DONE = "data: [DONE]\n\n"


def delta(content: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': content}}]})}\n\n"


def stream(*frames: str) -> httpx.Response:
    return httpx.Response(200, text="".join(frames))


def failure(status: int, code: str, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": code, "message": message, "param": None}})


def client(handler: Handler) -> httpx.Client:
    return httpx.Client(base_url="http://server", transport=httpx.MockTransport(handler))


def conversation(*answers: httpx.Response) -> tuple[Conversation, list[list[dict[str, str]]]]:
    """A conversation with these answers, and the messages that each question sent."""
    sent: list[list[dict[str, str]]] = []
    left = iter(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content)["messages"])
        return next(left)

    return Conversation(client(answer), "m", 0.5), sent


def screen() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=80), text


def test_an_answer_comes_in_pieces() -> None:
    talk, _ = conversation(stream(delta("Pa"), ": ping\n\n", delta("ris"), DONE))

    assert list(talk.ask("capital?")) == ["Pa", "ris"]


def test_the_next_question_bears_what_was_said_before() -> None:
    talk, sent = conversation(stream(delta("Hi"), DONE), stream(delta("Yes"), DONE))

    list(talk.ask("hello"))
    list(talk.ask("there?"))

    assert [message["content"] for message in sent[1]] == ["hello", "Hi", "there?"]
    assert [message["role"] for message in sent[1]] == ["user", "assistant", "user"]


def test_a_refused_question_is_the_servers_error_and_is_forgotten() -> None:
    talk, _ = conversation(failure(400, "context_length_exceeded", "too long"))

    with pytest.raises(ContextLengthExceeded, match="too long"):
        list(talk.ask("x"))

    assert talk.messages == []


def test_an_error_inside_the_stream_keeps_what_came_before() -> None:
    error = {"error": {"code": "worker_lost", "message": "gone", "param": None}}
    talk, _ = conversation(stream(delta("Par"), f"data: {json.dumps(error)}\n\n"))

    with pytest.raises(WorkerLost):
        list(talk.ask("capital?"))

    assert [message["content"] for message in talk.messages] == ["capital?", "Par"]


def test_a_stream_without_its_end_is_an_error() -> None:
    talk, _ = conversation(stream(delta("Par")))

    with pytest.raises(InternalError, match="answer was complete"):
        list(talk.ask("capital?"))


def test_an_answer_that_is_stopped_stays_as_far_as_it_went() -> None:
    talk, _ = conversation(stream(delta("one"), delta("two"), DONE))

    with closing(talk.ask("count")) as pieces:
        next(pieces)

    assert talk.messages[-1] == {"role": "assistant", "content": "one"}


def test_an_answer_that_is_no_json_is_an_error_with_its_status() -> None:
    talk, _ = conversation(httpx.Response(502, text="<html>"))

    with pytest.raises(InternalError, match="502"):
        list(talk.ask("x"))


def test_the_first_model_of_the_list_answers() -> None:
    listing = {"data": [{"id": "smollm2"}, {"id": "other"}]}

    assert first_model(client(lambda _: httpx.Response(200, json=listing))) == "smollm2"


def test_a_server_without_models_stops_the_start() -> None:
    with pytest.raises(StartupError, match="no model"):
        first_model(client(lambda _: httpx.Response(200, json={"data": []})))


def test_a_server_that_is_not_there_stops_the_start() -> None:
    with connect("http://127.0.0.1:1") as nobody, pytest.raises(StartupError, match="no server"):
        first_model(nobody)


def test_text_is_shown_as_it_is() -> None:
    talk, _ = conversation(stream(delta("[bold]a[/bold] " + "b" * 100), DONE))
    console, text = screen()

    show_answer(talk, "x", console)

    assert text.getvalue() == "[bold]a[/bold] " + "b" * 100 + "\n"


def test_a_conversation_goes_on_after_an_error_and_ends_at_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("capital?\n\ncapital?\n/exit\nnever asked\n"))
    talk, sent = conversation(
        failure(429, "rate_limit_exceeded", "later"), stream(delta("Paris"), DONE)
    )
    console, text = screen()

    converse(talk, console)

    assert len(sent) == 2
    assert "rate_limit_exceeded: later" in text.getvalue()
    assert "Paris" in text.getvalue()

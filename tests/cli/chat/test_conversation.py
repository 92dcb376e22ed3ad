"""The terminal's conversation, with a server that gives prepared answers."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from cli.chat.command import Chat, chosen
from cli.chat.conversation import PATIENCE_S, Conversation, ModelServer, show_answer
from gateway.wiring import TUNING
from shared.errors import (
    ContextLengthExceeded,
    InternalError,
    InvalidApiKey,
    ModelNotFound,
    PermissionDenied,
    StartupError,
    WorkerLost,
)
from tests.support.deployment.command import warren
from tests.support.gateway.serving import served
from tests.support.workers.scripted_worker import MODEL

DONE = "data: [DONE]\n\n"
MODELS = {"data": [{"id": "m", "owned_by": "warren"}, {"id": "other", "owned_by": "warren"}]}
OF_WARREN = {"x-stream-token": "t", "x-request-id": "chatcmpl-1"}

Handler = Callable[[httpx.Request], httpx.Response]


def delta(content: str, event_id: str = "") -> str:
    data = f"data: {json.dumps({'choices': [{'delta': {'content': content}}]})}\n\n"
    return f"id: {event_id}\n{data}" if event_id else data


def thought(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'reasoning_content': text}}]})}\n\n"


def ending(reason: str) -> str:
    choice = {"delta": {}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n{DONE}"


def stream(*frames: str, **headers: str) -> httpx.Response:
    return httpx.Response(200, text="".join(frames), headers=headers)


def failure(status: int, code: str, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": code, "message": message, "param": None}})


class Answers:
    """A server that gives these answers in order, or raises them, and keeps the requests."""

    def __init__(
        self, *answers: httpx.Response | Exception, models: dict[str, Any] = MODELS
    ) -> None:
        self.requests: list[httpx.Request] = []
        self._models = models
        self._left = iter(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=self._models)
        self.requests.append(request)
        answer = next(self._left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def messages(self) -> list[list[dict[str, str]]]:
        """The messages of each question."""
        posted = [request for request in self.requests if request.method == "POST"]
        return [json.loads(request.content)["messages"] for request in posted]


def server(handler: Handler, patience_s: float = PATIENCE_S) -> ModelServer:
    transport = httpx.MockTransport(handler)
    return ModelServer("http://server", transport=transport, patience_s=patience_s)


def conversation(*answers: httpx.Response | Exception) -> tuple[Conversation, Answers]:
    """A conversation with a server that may be any vendor's."""
    handler = Answers(*answers)
    return Conversation(server(handler), "m", 0.5), handler


def with_warren(*answers: httpx.Response | Exception) -> tuple[Conversation, Answers]:
    """A conversation with a server that is known to be Warren."""
    handler = Answers(*answers)
    asked = server(handler)
    asked.models()
    return Conversation(asked, "m", 0.5), handler


def said(talk: Conversation, question: str) -> list[str]:
    """The pieces of the answer."""
    return [text for text, _ in talk.ask(question)]


def test_an_answer_comes_in_pieces() -> None:
    talk, _ = conversation(stream(delta("Pa"), ": ping\n\n", delta("ris"), DONE))

    assert said(talk, "capital?") == ["Pa", "ris"]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_a_line_ends_at_no_other_character_than_sse_says(character: str) -> None:
    data = json.dumps({"choices": [{"delta": {"content": f"a{character}b"}}]}, ensure_ascii=False)
    talk, _ = conversation(stream(f"data: {data}\r\n\r\n", DONE))

    assert said(talk, "x") == [f"a{character}b"]


def test_a_field_needs_no_space_after_its_colon() -> None:
    talk, _ = conversation(stream(delta("Paris").replace("data: ", "data:"), "data:[DONE]\n\n"))

    assert said(talk, "capital?") == ["Paris"]


@pytest.mark.parametrize("data", ["no JSON", '{"choices": [{}]}', '{"error": {"code": null}}'])
def test_an_event_that_is_no_chunk_is_an_error(data: str) -> None:
    talk, _ = conversation(stream(f"data: {data}\n\n"))

    with pytest.raises(InternalError, match="not a chat completion chunk"):
        list(talk.ask("x"))


def test_only_a_silence_of_warren_which_pings_its_streams_is_a_lost_connection() -> None:
    silences = []
    for owner in ("warren", "another"):
        sent = Answers(stream(delta("A"), DONE), models={"data": [{"id": "m", "owned_by": owner}]})
        asked = server(sent)
        asked.models()
        list(Conversation(asked, "m", 0).ask("x"))
        silences.append(sent.requests[0].extensions["timeout"]["read"])

    assert 2 * TUNING.ping_interval_s < silences[0] < PATIENCE_S
    assert silences[1] is None


def test_the_next_question_comes_with_what_was_said_before_and_the_system_prompt() -> None:
    talk, sent = conversation(stream(delta("Hi"), DONE), stream(delta("Yes"), DONE))
    talk.system = "Be brief."

    list(talk.ask("hello"))
    list(talk.ask("there?"))

    assert [message["content"] for message in sent.messages[1]] == [
        "Be brief.",
        "hello",
        "Hi",
        "there?",
    ]
    assert [message["role"] for message in sent.messages[1]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


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


def test_a_stream_without_its_end_is_an_error_of_a_server_that_cannot_resume() -> None:
    talk, sent = conversation(stream(delta("Par")))

    with pytest.raises(InternalError, match="answer was complete"):
        list(talk.ask("capital?"))
    assert len(sent.requests) == 1


def test_a_lost_stream_goes_on_after_its_last_event() -> None:
    half = 'id: 2.9\ndata: {"choices": [{"del'  # is not taken for an event
    talk, sent = with_warren(
        stream(delta("Par", "1.3"), half, **OF_WARREN),
        httpx.ConnectError("refused"),
        httpx.Response(502, text="<html>"),
        stream(delta("is", "2.5"), DONE),
    )

    assert said(talk, "capital?") == ["Par", "is"]

    resumed = sent.requests[1:]
    assert [request.url.path for request in resumed] == ["/v1/streams/chatcmpl-1"] * 3
    assert {request.headers["last-event-id"] for request in resumed} == {"1.3"}


def test_a_gateway_that_shuts_down_is_no_error() -> None:
    error = {"error": {"code": "service_unavailable", "message": "shutting down"}}
    talk, _ = with_warren(
        stream(delta("Par", "1.3"), f"data: {json.dumps(error)}\n\n", **OF_WARREN),
        httpx.Response(204),
    )

    assert said(talk, "capital?") == ["Par"]


def test_a_question_that_was_not_answered_is_asked_again_under_the_same_key() -> None:
    talk, sent = with_warren(
        httpx.ReadError("broken"),
        failure(503, "service_unavailable", "draining"),
        stream(delta("Paris", "1.5"), DONE, **OF_WARREN),
    )

    assert said(talk, "capital?") == ["Paris"]
    assert len({request.headers["idempotency-key"] for request in sent.requests}) == 1


def test_patience_ends() -> None:
    handler = Answers(*[httpx.ConnectError("refused")] * 9)
    asked = server(handler, patience_s=0)
    asked.models()

    with pytest.raises(InternalError, match="the connection was lost: refused"):
        list(Conversation(asked, "m", 0).ask("capital?"))


def test_an_answer_that_is_stopped_stays_as_far_as_it_went_and_is_cancelled() -> None:
    talk, sent = with_warren(
        stream(delta("one", "1.3"), delta("two", "2.6"), DONE, **OF_WARREN), httpx.Response(200)
    )

    with closing(talk.ask("count")) as pieces:
        next(pieces)

    assert talk.messages[-1] == {"role": "assistant", "content": "one"}
    assert (sent.requests[-1].method, sent.requests[-1].url.path) == (
        "DELETE",
        "/v1/streams/chatcmpl-1",
    )


def test_an_answer_that_is_no_json_is_an_error_with_its_status() -> None:
    talk, _ = conversation(httpx.Response(500, text="<html>"))

    with pytest.raises(InternalError, match="500"):
        list(talk.ask("x"))


@pytest.mark.parametrize("error", ["no", {"message": "no", "code": [4]}])
def test_an_error_of_another_server_is_shown(error: object) -> None:
    body = json.dumps({"error": error})
    talk, _ = conversation(httpx.Response(400, text=body), stream(f"data: {body}\n\n"))

    for _ in range(2):
        with pytest.raises(InternalError, match=r"^no$"):
            list(talk.ask("x"))


@pytest.mark.parametrize(
    "url", ["http://server", "http://server/", "http://server/v1", "server/v1/"]
)
def test_the_url_may_end_with_v1(url: str) -> None:
    asked = ModelServer(url, transport=httpx.MockTransport(Answers()))

    assert asked.models() == ["m", "other"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, "requires an API key: set OPENAI_API_KEY, or name a file"),
        ("wk-3c5c4c7894-secret", r"does not accept the API key wk-3c5c4c7894-\.\.\. of --api-key"),
        ("sk-secret", "does not accept the API key of --api-key"),
    ],
)
def test_a_refused_key_is_named_without_its_secret(key: str | None, message: str) -> None:
    transport = httpx.MockTransport(lambda _: failure(401, "invalid_api_key", "no"))

    with pytest.raises(StartupError, match=message) as refused:
        ModelServer("http://server", key, transport=transport).models()
    assert "secret" not in str(refused.value)
    with pytest.raises(InvalidApiKey, match=message):
        list(Conversation(ModelServer("http://server", key, transport=transport), "m", 0).ask("x"))


def test_a_server_that_is_not_there_stops_the_start() -> None:
    with pytest.raises(
        StartupError, match=r"no server answers at http://127\.0\.0\.1:1: Connection"
    ):
        ModelServer("http://127.0.0.1:1").models()


def test_what_is_no_model_server_stops_the_start() -> None:
    with pytest.raises(StartupError, match="not an OpenAI-compatible server"):
        server(lambda _: httpx.Response(200, text="<html>")).models()


def test_text_is_shown_as_it_is() -> None:
    talk, _ = conversation(stream(delta("[bold]a[/bold] " + "b" * 100), DONE))
    text = io.StringIO()

    show_answer(talk, "x", Console(file=text, width=80))

    assert text.getvalue() == "[bold]a[/bold] " + "b" * 100 + "\n"


def shown_of(talk: Conversation, *, on_terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=on_terminal, color_system="standard")
    show_answer(talk, "x", console)
    return text.getvalue()


def test_thoughts_are_dimmed_on_a_terminal_and_are_not_piped() -> None:
    answer = [thought("[b]H"), thought("m"), delta("Par"), delta("is"), ending("stop")]
    talk, sent = conversation(stream(*answer), stream(*answer))

    shown = shown_of(talk, on_terminal=True)

    assert shown == "\x1b[2m[b]H\x1b[0m\x1b[2mm\x1b[0m\n\nParis\n"
    assert shown_of(talk, on_terminal=False) == "Paris\n"
    assert sent.messages[1][1] == {"role": "assistant", "content": "Paris"}


ATTACK = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b2J"
HARMLESS = r"\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b2J"


def test_neither_an_answer_nor_thoughts_control_the_terminal() -> None:
    talk, _ = conversation(stream(thought(ATTACK), delta(f"{ATTACK}\n\té\u3000猫"), ending("stop")))

    shown = shown_of(talk, on_terminal=True)

    assert shown == f"\x1b[2m{HARMLESS}\x1b[0m\n\n{HARMLESS}\n        é\u3000猫\n"


def test_an_answer_is_written_to_a_file_as_it_is() -> None:
    text = f"all:\n\tcc {'x' * 100}\r\n\x1b[1m"
    talk, _ = conversation(stream(delta(text[:5]), delta(text[5:]), DONE))

    assert shown_of(talk, on_terminal=False) == f"{text}\n"


@pytest.mark.parametrize(
    ("reason", "message"),
    [("length", "the model was still thinking at the limit"), ("stop", "The answer is empty.")],
)
def test_an_empty_answer_is_explained_beside_it(
    reason: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    talk, _ = conversation(stream(thought("Hm"), ending(reason)))

    assert shown_of(talk, on_terminal=False) == "\n"
    explained = " ".join(capsys.readouterr().err.split())
    assert message in explained
    assert "The question is forgotten." in explained
    assert talk.messages == []


class Typed:
    """What a user types, and what the terminal shows for it."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        handler = Answers(*answers)
        self.server = server(handler)
        self.sent = handler
        self.talk = Conversation(self.server, "m", 0.5)
        self._screen = io.StringIO()

    def type(self, *lines: str) -> str:
        """Type lines and then Ctrl-D; returns what is on the screen."""
        left: Iterator[str] = iter(lines)

        def read() -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        console = Console(file=self._screen, width=80, color_system=None)
        Chat(self.server, self.talk, read, console, console).run()
        return self._screen.getvalue()


def test_a_conversation_goes_on_after_an_error_and_ends_at_exit() -> None:
    user = Typed(failure(429, "rate_limit_exceeded", "later"), stream(delta("Paris"), DONE))

    shown = user.type("capital?", "", "capital?", "/exit", "never asked")

    assert len(user.sent.requests) == 2
    assert "rate_limit_exceeded: later" in shown
    assert "Paris" in shown


def test_pasted_lines_are_one_question() -> None:
    user = Typed(stream(delta("Yes"), DONE))

    user.type("first line\nsecond line\n")

    assert user.sent.messages == [[{"role": "user", "content": "first line\nsecond line"}]]


def test_a_model_is_listed_and_chosen() -> None:
    user = Typed(stream(delta("Yes"), DONE))

    shown = user.type("/model", "/model othr", "/model other", "hello")

    assert "* m\n  other\n" in shown
    assert "othr is not served: did you mean other?" in shown
    assert json.loads(user.sent.requests[0].content)["model"] == "other"


def test_what_a_server_says_does_not_control_the_terminal() -> None:
    models = {"data": [{"id": f"[/]{ATTACK}\n{k}"} for k in range(2)]}
    handler = Answers(failure(429, "rate_limit_exceeded", f"later {ATTACK}"), models=models)
    asked, screen = server(handler), io.StringIO()
    typed = iter(["/model", "/model m", "/system a\tb", "hello", "/exit"])
    talk = Conversation(asked, chosen(asked, None), 0.5)

    console = Console(file=screen, width=200, force_terminal=True, color_system=None)
    Chat(asked, talk, lambda: next(typed), console, console).run()

    shown = screen.getvalue()
    assert "\x1b" not in shown
    assert f"[/]{HARMLESS}\\n0 is ready." in shown
    assert f"* [/]{HARMLESS}\\n0\n  [/]{HARMLESS}\\n1\n" in shown
    assert f"later {HARMLESS}" in shown


@pytest.mark.parametrize("owner", ["warren", "another"])
def test_a_model_that_only_a_gateway_would_list_is_refused_if_it_is_a_gateway(owner: str) -> None:
    models = {"data": [{"id": name, "owned_by": owner} for name in ("m", "other")]}
    asked = server(Answers(models=models))

    assert chosen(asked, None) == "m"
    assert chosen(asked, "other") == "other"
    if owner == "another":
        assert chosen(asked, "othr") == "othr"
    else:
        with pytest.raises(ModelNotFound, match=r"othr is not .*: did you mean other\?") as refused:
            chosen(asked, "othr")
        assert refused.value.message.endswith("\nm\nother")


@pytest.mark.parametrize(
    "answer",
    [failure(403, "insufficient_permissions", "no"), httpx.Response(200, json={"data": []})],
)
def test_a_named_model_need_not_be_listed_if_none_is(answer: httpx.Response) -> None:
    asked = server(lambda _: answer)

    assert chosen(asked, "m") == "m"
    with pytest.raises((PermissionDenied, StartupError)):
        chosen(asked, None)


@pytest.mark.parametrize(("model", "shown"), [("nosuch", "is not served"), (MODEL, "invalid_")])
def test_a_failed_question_that_is_piped_fails_the_command(model: str, shown: str) -> None:
    options = [f"--model={model}", "--temperature=9"]
    with served() as url:
        done = warren("chat", "--url", url, *options, typed="hello\n")

    assert done.returncode == 1
    assert shown in done.stderr
    assert ("is ready" in done.stderr) == (model == MODEL)


def test_only_the_answers_are_piped() -> None:
    with served() as url:
        done = warren("chat", "--url", url, "--max-tokens=5", typed="hello\n/help\n")

    assert done.returncode == 0
    assert done.stdout.strip()
    assert MODEL not in done.stdout
    assert "/help" not in done.stdout
    assert "/help" in done.stderr


def test_a_system_prompt_stays_when_the_conversation_is_forgotten() -> None:
    user = Typed(stream(delta("A"), DONE), stream(delta("B"), DONE), stream(delta("C"), DONE))

    user.type("/system Be brief.", "one", "/clear", "two", "/system -", "three")

    assert [len(messages) for messages in user.sent.messages] == [2, 2, 3]
    assert user.sent.messages[1][0] == {"role": "system", "content": "Be brief."}
    assert user.sent.messages[2][0] == {"role": "user", "content": "two"}


def test_a_conversation_is_saved_and_no_file_is_replaced(tmp_path: Path) -> None:
    user = Typed(stream(delta("Paris"), DONE))
    as_json, as_markdown = tmp_path / "talk.json", tmp_path / "talk.md"
    as_markdown.write_text("mine")

    nowhere = tmp_path / "no" / "talk"

    shown = user.type("capital?", f"/save {as_json}", f"/save {as_markdown}", f"/save {nowhere}")

    assert json.loads(as_json.read_text())["messages"][1]["content"] == "Paris"
    assert as_markdown.read_text() == "mine"
    assert "talk.md cannot be written: File exists" in shown.replace("\n", "")
    assert "no/talk cannot be written: No such file or directory" in shown.replace("\n", "")


def test_a_question_that_is_stopped_before_its_answer_is_forgotten() -> None:
    def stop(request: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt

    asked, screen = server(stop), io.StringIO()
    talk = Conversation(asked, "m", 0.5)
    typed = iter(["capital?", "/exit"])

    console = Console(file=screen, width=80)
    Chat(asked, talk, lambda: next(typed), console, console).run()

    assert "stopped; the question is forgotten" in screen.getvalue()
    assert talk.messages == []


def test_an_unknown_command_is_not_sent_to_the_model() -> None:
    user = Typed()

    shown = user.type("/hlep", "/help")

    assert "unknown command /hlep: did you mean /help?" in shown
    assert "/save FILE" in shown
    assert user.sent.requests == []

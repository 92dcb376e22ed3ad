import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.batch.input_file import BatchFile, model_of
from gateway.api.bodies.parsing import parse
from gateway.api.bodies.schemas import ChatRequest
from gateway.api.bodies.submission import submission
from gateway.api.render.formats import rendering_of
from shared.errors import InvalidRequest
from shared.messages import ChatPrompt, TextPrompt
from tests.support.workers.batch_files import chat_line, completion_line, write_lines
from tests.support.workers.batch_worker import MODEL, SERVED

NESTED = b"[" * 20_000 + b"]" * 20_000
UNREADABLE_LINES = [
    json.dumps(chat_line("a", model="café"), ensure_ascii=False).encode("latin-1") + b"\n",
    json.dumps(chat_line("a", x="nested")).encode().replace(b'"nested"', NESTED) + b"\n",
]
TIME = {"type": "function", "function": {"name": "get_time"}}


def problems(path: Path) -> list[str]:
    """The error for each bad line."""
    with pytest.raises(InvalidRequest) as error:
        BatchFile.check(path)
    return str(error.value).splitlines()[1:]


def test_long_answers_start_first(tmp_path: Path) -> None:
    lines = [chat_line(str(k), max_tokens=length) for k, length in enumerate((10, 1, 2000, 100))]

    assert BatchFile.check(write_lines(tmp_path / "in.jsonl", *lines)).order == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ([], "object"),
        ({**chat_line("a"), "custom_id": ""}, "custom_id"),
        ({**chat_line("a"), "method": "GET"}, "'GET'; expected POST - at `$.method`"),
        (
            chat_line("a", messages=[{"role": "wizard", "content": "x"}]),
            "'wizard'; expected assistant or",
        ),
        ({**chat_line("a"), "url": "/v1/embeddings"}, "URL is not /v1/chat/completions or"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/completions"}, "body"),
        ({**chat_line("a"), "body": 1}, "object"),
        (chat_line("a", messages=[]), "messages"),
        (chat_line("a", temperature=3), "temperature"),
        (chat_line("a", stream=True), "stream"),
        (chat_line("a", tools=[{"type": "function"}]), "tools[0].function"),
        (chat_line("a", tools=[TIME]), "No worker of this model has said yet"),
        (chat_line("a", response_format={"type": "xml"}), "response_format.type"),
        (chat_line("a", guided_regex="(a"), "guided_regex"),
        (completion_line("a", prompt=[]), "prompt"),
        (chat_line("first"), "custom_id 'first' is not unique"),
        (chat_line("a", model="other"), f"model: 'other', but the first line has '{MODEL}'"),
        (chat_line("a", model="no such/ name"), "model"),
    ],
)
def test_a_bad_line_is_named_with_its_number(line: Any, problem: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_line("first"), line, chat_line("last"))

    (said,) = problems(path)

    assert said.startswith("line 2: ")
    assert problem in said


def test_text_that_is_no_json_is_named_and_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(json.dumps(chat_line("a")).encode() + b'\n{"secret\xff\n')

    (said,) = problems(path)

    assert said.startswith("line 2: ")
    assert "secret" not in said


@pytest.mark.parametrize("line", UNREADABLE_LINES, ids=["Latin-1", "nested"])
def test_a_line_that_cannot_be_read_has_no_model_and_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line)

    assert model_of(path) is None
    (said,) = problems(path)
    assert re.match("line 1: The (line|body) is not valid JSON: ", said)


def test_all_bad_lines_are_counted_and_the_first_are_shown(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", *([0] * 50))

    said = problems(path)

    assert said[0].startswith("line 1: ")
    assert said[-1] == "and 30 more"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n\n")

    with pytest.raises(InvalidRequest, match="no requests"):
        BatchFile.check(tmp_path / "in.jsonl")


def test_a_line_is_read_again_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    first, second = chat_line("é", content="ünï"), completion_line("b", prompt="two")
    path.write_text(f"\n{json.dumps(first, ensure_ascii=False)}\r\n\n{json.dumps(second)}")

    file = BatchFile.check(path)

    assert file.custom_ids == ("é", "b")
    (chat,), (text,) = file.job(0, 0).prompts, file.job(1, 0).prompts
    assert isinstance(chat, ChatPrompt)
    assert chat.messages[0].content == "ünï"
    assert text == TextPrompt(text="two")


def test_a_job_asks_for_one_answer_and_waits_for_no_reader(tmp_path: Path) -> None:
    job = BatchFile.check(write_lines(tmp_path / "in.jsonl", chat_line("a"))).job(0, 0)

    assert job.mode == "final"
    assert job.is_detached
    assert job.deadline is None


def test_the_same_input_has_the_same_jobs_wherever_it_lies(tmp_path: Path) -> None:
    lines = [chat_line("a"), chat_line("b")]
    here = BatchFile.check(write_lines(tmp_path / "here", *lines))
    there = BatchFile.check(write_lines(tmp_path / "there", *lines))
    other = BatchFile.check(write_lines(tmp_path / "other", *lines, chat_line("c")))

    assert (here.run_id, here.request_id(0)) == (there.run_id, there.request_id(0))
    assert here.job(1, 5) == there.job(1, 5)
    assert len({here.request_id(0), here.request_id(1), other.request_id(0)}) == 3
    assert here.position(here.request_id(1)) == 1
    assert here.position(other.request_id(0)) is None


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [TIME]},
        {"tools": [TIME], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [TIME], "tool_choice": TIME},
        {"tools": [TIME], "tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_grammar": 'root ::= "a" ("b" | "c")'},
        {"n": 3, "logprobs": True, "top_logprobs": 2, "seed": 7, "stop": ["x"], "top_k": -1},
        {"include_reasoning": False, "logit_bias": {"7": -100}, "max_completion_tokens": 3},
    ],
)
def test_a_line_asks_for_what_its_endpoint_would(body: dict[str, Any], tmp_path: Path) -> None:
    line = chat_line("a", **body)
    file = BatchFile.check(write_lines(tmp_path / "in.jsonl", line), SERVED)
    request = parse(ChatRequest, json.dumps(line["body"]).encode())
    endpoints = submission(request, request_id="r", created_at=5, served=SERVED).job

    job = file.job(0, 5)

    assert (job.prompts, job.sampling) == (endpoints.prompts, endpoints.sampling)
    theirs, ours = rendering_of(endpoints.context), rendering_of(job.context)
    assert ours == msgspec.structs.replace(theirs, request_id=job.request_id)


def test_the_first_line_with_a_model_names_it(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", 3, {"body": {}}, chat_line("a"), chat_line("b"))

    assert model_of(path) == MODEL
    path.write_bytes(b"".join([*UNREADABLE_LINES, path.read_bytes()]))
    assert model_of(path) == MODEL
    assert model_of(write_lines(tmp_path / "none.jsonl", {"body": {"model": "no such/ "}})) is None

"""Which fields of a message are ignored."""

from typing import Any

import msgspec
import pytest

from shared.messages import DetokenizeJob, GenerationJob, encode, unknown_fields

CHAT = {"type": "chat", "messages": [{"role": "user", "content": "Hi"}], "tools": [{"name": "f"}]}
JOB: dict[str, Any] = {
    "type": "generation_job",
    "request_id": "a",
    "model": "m",
    "prompts": [{"type": "tokens", "token_ids": [1, 2]}, CHAT],
    "sampling": {"max_tokens": 3, "seed": None, "constraint": {"kind": "regex", "source": "a"}},
}


def changed(*path: str | int, **fields: Any) -> dict[str, Any]:
    """A job with more fields in the part at ``path``."""
    job: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(JOB))
    part: Any = job
    for step in path:
        part = part[step]
    part.update(fields)
    return job


@pytest.mark.parametrize("is_json", [True, False])
@pytest.mark.parametrize(
    ("job", "fields"),
    [
        (JOB, ()),
        (changed(samplign={"max_tokens": 3}), ("samplign",)),
        (changed("sampling", max_token=3, stops=["a"]), ("sampling.max_token", "sampling.stops")),
        (changed("sampling", "constraint", text="b"), ("sampling.constraint.text",)),
        (changed("prompts", 1, "messages", 0, contnt=""), ("prompts[1].messages[0].contnt",)),
        (changed("prompts", 0, text="Hi"), ("prompts[0].text",)),
        (changed("prompts", 1, "tools", 0, parameters={"any": 1}), ()),
        (changed(**{"\x1b[2J": 1}), ("\\x1b[2J",)),
    ],
)
def test_they_are_named_with_their_paths(
    job: dict[str, Any], fields: tuple[str, ...], is_json: bool
) -> None:
    body = (msgspec.json if is_json else msgspec.msgpack).encode(job)

    assert unknown_fields(GenerationJob, body, is_json=is_json) == fields


def test_the_first_of_many_are_named_in_part() -> None:
    body = msgspec.json.encode(JOB | {f"{k:02}" + "x" * 1000: k for k in range(100)})

    found = unknown_fields(GenerationJob, body, is_json=True)

    assert [name[:3] for name in found] == [f"{k:02}x" for k in range(16)]
    assert {*map(len, found)} == {64}


def test_a_name_that_is_no_text_is_reported() -> None:
    body = msgspec.json.encode(JOB | {"x": 1}).replace(b'"x"', b'"\xff"')
    msgspec.json.decode(body, type=GenerationJob)

    assert unknown_fields(GenerationJob, body, is_json=True) == ("a name that is not UTF-8",)


def test_what_warren_writes_has_none() -> None:
    job = DetokenizeJob(request_id="a", model="m", token_ids=(1,))

    assert unknown_fields(DetokenizeJob, encode(job), is_json=False) == ()

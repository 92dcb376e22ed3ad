"""How many values a job may have where any are permitted."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import UndecodableMessage
from shared.messages import JSON, MSGPACK, TextPrompt, decode_job, decode_quick_job
from shared.messages.open_values import (
    MAX_CONTAINERS,
    MAX_VALUES,
    check_open_values,
    count_msgpack,
)
from tests.shared.test_messages import JOB

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
)


def numbers_of(value: Any) -> tuple[int, int]:
    """The numbers of values, names included, and of containers."""
    if not isinstance(value, list | dict):
        return 1, 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    numbers = [numbers_of(one) for one in inner]
    return 1 + sum(values for values, _ in numbers), 1 + sum(several for _, several in numbers)


@given(VALUES)
def test_every_value_is_counted(value: Any) -> None:
    assert count_msgpack(msgspec.msgpack.encode(value)) == numbers_of(value)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 8, 16, 17, 300, 70_000])
def test_extensions_are_values(size: int) -> None:
    extension = msgspec.msgpack.Ext(5, b"x" * size)

    assert count_msgpack(msgspec.msgpack.encode([extension, "y" * 70_000, 1])) == (4, 1)


def test_several_parts_share_the_limits() -> None:
    half = b"\xdd" + (MAX_VALUES // 2 - 1).to_bytes(4, "big") + b"\x01" * (MAX_VALUES // 2 - 1)

    check_open_values([half, half], is_json=False)
    with pytest.raises(UndecodableMessage):
        check_open_values([half, half, b"\x01"], is_json=False)


def with_variables(content_type: str, variables: bytes) -> bytes:
    job = msgspec.to_builtins(JOB)
    job["prompts"][0]["template_kwargs"] = msgspec.Raw(variables)
    return msgspec.json.encode(job) if content_type == JSON else msgspec.msgpack.encode(job)


@pytest.mark.parametrize(
    ("content_type", "variables"),
    [
        (MSGPACK, b"\x81\xa1a\xdd" + (1 << 21).to_bytes(4, "big") + b"\x90" * (1 << 21)),
        (JSON, b'{"a":[' + b"[]," * MAX_CONTAINERS + b"[]]}"),
    ],
)
def test_a_job_with_too_many_values_is_refused_before_it_is_decoded(
    content_type: str, variables: bytes
) -> None:
    with pytest.raises(UndecodableMessage, match="more than 524288 values or 32768 objects"):
        decode_job(with_variables(content_type, variables), content_type)


def test_a_quick_job_with_too_many_values_is_refused() -> None:
    prompt = {"type": "chat", "messages": [], "tools": [[[]] * MAX_CONTAINERS]}
    body = msgspec.msgpack.encode({"type": "tokenize_job", "prompt": prompt})

    with pytest.raises(UndecodableMessage, match="more than 524288 values"):
        decode_quick_job(body, MSGPACK)


def test_prompts_without_such_values_may_be_long() -> None:
    long = msgspec.structs.replace(JOB, prompts=(TextPrompt(text="[,{" * 100_000),))

    assert decode_job(msgspec.msgpack.encode(long)) == long
    assert decode_job(msgspec.json.encode(long), JSON) == long

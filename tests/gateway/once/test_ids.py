"""The ids of shared executions and of their clients' streams."""

import secrets

from hypothesis import given
from hypothesis import strategies as st

from gateway.log.reply_queues import new_id
from gateway.once.ids import ExecutionIds

PREFIXES = st.sampled_from(["chatcmpl-", "cmpl-", "msg_", "resp_"])


@given(prefix=PREFIXES, key=st.binary(min_size=32, max_size=32), tenant=st.text(max_size=8))
def test_any_gateway_finds_the_execution_of_any_of_its_streams(
    prefix: str, key: bytes, tenant: str
) -> None:
    execution_id = ExecutionIds(key).execution_id(prefix, tenant, "digest")

    streams = {ExecutionIds(key).stream_id(execution_id) for _ in range(8)}

    assert len(streams) == 8
    assert {ExecutionIds(key).execution_of(stream) for stream in streams} == {execution_id}


def test_executions_differ_by_kind_tenant_and_request() -> None:
    ids = ExecutionIds(b"key")
    named = [("cmpl-", "a", "x"), ("msg_", "a", "x"), ("cmpl-", "b", "x"), ("cmpl-", "a", "y")]

    assert len({ids.execution_id(*name) for name in named}) == len(named)


def test_other_streams_have_no_execution() -> None:
    ids = ExecutionIds(secrets.token_bytes())
    others = [new_id("chatcmpl-") for _ in range(1000)]

    assert sum(ids.execution_of(other) is not None for other in others) < 5
    assert ids.execution_of("req-1") is None


def test_another_secret_names_other_executions() -> None:
    stream = ExecutionIds(b"one").stream_id(ExecutionIds(b"one").execution_id("cmpl-", "", "d"))

    assert ExecutionIds(b"two").execution_of(stream) != ExecutionIds(b"one").execution_of(stream)

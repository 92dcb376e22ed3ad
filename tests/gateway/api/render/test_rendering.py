"""The rendering that a log carries."""

from typing import Any

import msgspec
import pytest

from gateway.api.bodies.submission import facts_of
from gateway.api.render.formats import Rendering, decode_rendering, rendering_of
from shared.errors import InvalidRequest, StreamNotFound
from shared.messages import MAX_CONTEXT_BYTES

RENDERING = Rendering(endpoint="chat", request_id="r", model="m", created=1, num_choices=3)
FACTS, _ = facts_of(RENDERING, tenant="a", body_hash="", is_detached=False)


def test_a_log_carries_its_rendering() -> None:
    assert decode_rendering(FACTS) == RENDERING


@pytest.mark.parametrize(
    "changes",
    [
        {"num_choices": 2},
        {"num_choices": 10_000_000},
        {"num_prompts": 10_000_000},
        {"num_prompts": -1, "num_choices": -3},
        {"best_of": 10_000_000},
        {"endpoint": "other"},
    ],
)
def test_a_rendering_that_no_gateway_wrote_is_not_found(changes: dict[str, object]) -> None:
    planted = msgspec.msgpack.encode(msgspec.structs.replace(RENDERING, **changes))

    with pytest.raises(StreamNotFound):
        decode_rendering(msgspec.structs.replace(FACTS, rendering=planted))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"text_parameters": {"f": ("x" * MAX_CONTEXT_BYTES,)}}, "tools"),
        ({"echoed": b'{"text":{},"metadata":"' + b"x" * MAX_CONTEXT_BYTES + b'"}'}, "metadata"),
    ],
)
def test_what_is_too_long_for_a_log_is_named(changes: dict[str, Any], param: str) -> None:
    rendering = msgspec.structs.replace(RENDERING, **changes)

    with pytest.raises(InvalidRequest) as caught:
        facts_of(rendering, tenant="a", body_hash="", is_detached=False)

    assert caught.value.param == param


NESTED = b"\x81\xa7unknown" + b"\x91" * 100_000


@pytest.mark.parametrize(
    "context",
    [
        pytest.param(NESTED, id="facts"),
        pytest.param(msgspec.structs.replace(FACTS, rendering=NESTED).encode(), id="rendering"),
    ],
)
def test_a_context_that_is_nested_too_deeply_is_not_found(context: bytes) -> None:
    with pytest.raises((StreamNotFound, msgspec.MsgspecError)):
        rendering_of(context)

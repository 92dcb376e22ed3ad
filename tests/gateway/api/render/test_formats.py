"""What the answers of several endpoints have in common."""

import json
import re

import msgspec
import pytest

from shared.messages import Started
from tests.support.gateway.rendering import Log, context_of

FINGERPRINT = re.compile(r'"system_fingerprint": "([^"]*)"')


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses", "messages"])
@pytest.mark.parametrize(
    ("numerics", "fingerprint"),
    [(("a", "a"), "f1"), (("a", "b"), "f1-mixed"), (("", "b"), "f1")],
)
def test_the_fingerprint_shows_that_numerics_have_changed_within_the_answer(
    endpoint: str, numerics: tuple[str, str], fingerprint: str
) -> None:
    log = Log(context_of(endpoint=endpoint, fingerprint="f1")).say("a").finish("b")
    first, *tokens = log.events
    assert isinstance(first, Started)
    runs = [msgspec.structs.replace(first, numerics=one) for one in numerics]
    moved_on = msgspec.structs.replace(first, numerics="c")
    log.events = [runs[0], tokens[0], moved_on, runs[1], *tokens[1:]]

    assert FINGERPRINT.findall(json.dumps(log.chunks()))[-1] == fingerprint
    assert log.whole()["system_fingerprint"] == fingerprint

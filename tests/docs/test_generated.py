"""Generated parts of the pages are up to date."""

import re
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from docs.site.compatibility import operations, parameters, tables
from docs.site.endpoints import ENDPOINTS
from docs.site.generate import PAGES, rendered
from docs.site.messages import message_tables
from docs.site.models import families, formats
from docs.site.scaling import price
from gateway.api.bodies.counting import MessageTokensRequest, ResponseTokensRequest
from gateway.api.bodies.parsing import parse
from gateway.api.bodies.quick import QuickDraft
from shared import messages
from shared.errors import WarrenError
from shared.settings import WorkerSettings
from tests.support.pages import name_of
from worker.checkpoints.catalogue import MODELS
from worker.model.families import FAMILIES


@pytest.mark.parametrize("page", sorted(PAGES.rglob("*.md")), ids=name_of)
def test_a_page_is_what_would_be_generated(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert text == rendered(text), "run python -m docs.site.generate"


def test_the_readme_states_the_price_of_a_stream() -> None:
    stated = re.search(r"costs ([\d.]+ % of a core)", price())

    assert stated is not None
    assert stated[1] in (PAGES.parent / "README.md").read_text(encoding="utf-8")


def test_every_parameter_of_every_operation_is_in_its_table() -> None:
    sections = {part.split("\n", 1)[0]: part for part in tables().split("## ")[2:]}

    for endpoint in ENDPOINTS:
        ours = set(parameters(endpoint.operation))
        if endpoint.body is not None:
            ours |= {field.encode_name for field in msgspec.structs.fields(endpoint.body)}
            ours |= endpoint.body.neutral.keys() | endpoint.body.renamed.keys()
        section = sections.get(endpoint.operation, "")
        rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        assert ours | {*endpoint.origins} == {*rows}


def test_every_operation_is_listed() -> None:
    own: tuple[str, ...] = ("/health", "/live", "/metrics")
    names: tuple[str, ...] = (
        "batches",
        "dead-letters",
        "history",
        "keys",
        "models",
        "sessions",
        "status",
    )
    names += ("replays", "streams", "tenants")
    own += tuple(f"/admin/v1/{name}" for name in names)
    paths = {name: name.split()[1] for name in operations()}
    public = {
        name
        for name, path in paths.items()
        if not path.startswith(own) and not path.endswith("/drain")
    }

    assert {endpoint.operation for endpoint in ENDPOINTS} == public


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (ResponseTokensRequest, {"input": "one", "instructions": "two"}),
        (MessageTokensRequest, {"messages": [{"role": "user", "content": "one"}]}),
    ],
)
def test_what_is_ignored_when_tokens_are_counted_leaves_the_prompt_as_it_is(
    kind: type[ResponseTokensRequest] | type[MessageTokensRequest], asked: dict[str, Any]
) -> None:
    (endpoint,) = (one for one in ENDPOINTS if one.body is kind)
    assert endpoint.in_effect is not None
    ignored = {*kind.__struct_fields__} - {*endpoint.in_effect}
    values: list[Any] = [True, 1, 0.5, "x", "auto", ["x"], {"a": 1}]
    jobs = []
    for name, value in product(ignored, values):
        with suppress(WarrenError):
            body = parse(kind, msgspec.json.encode({**asked, name: value}))
            jobs.append(body.job(QuickDraft("m", "r", 1.0, "")))

    plain = parse(kind, msgspec.json.encode(asked)).job(QuickDraft("m", "r", 1.0, ""))
    assert len(jobs) > len(ignored)
    assert [job for job in jobs if job.prompt != plain.prompt] == []


def test_every_message_has_a_table_with_its_meaning() -> None:
    sections = {part.split("\n", 1)[0]: part for part in message_tables().split("### ")[1:]}

    named = [getattr(messages, name) for name in messages.__all__]
    structs = {one for one in named if isinstance(one, type) and issubclass(one, msgspec.Struct)}
    assert sections.keys() == {struct.__name__ for struct in structs}
    for struct in structs:
        assert struct.__doc__ != struct.__base__.__doc__
        rows = [line for line in sections[struct.__name__].splitlines() if "| `" in line]
        assert len(rows) == len(struct.__struct_fields__)


def test_every_family_and_every_weight_format_is_listed() -> None:
    named = set(re.findall(r"^\| `?(\w+)`? \|", f"{families()}\n{formats()}", re.MULTILINE))
    settings = WorkerSettings.model_fields
    values = {
        *get_args(settings["dtype"].annotation),
        *get_args(settings["weight_format"].annotation),
    }

    assert {*FAMILIES, *(model.family for model in MODELS.values())} <= named
    assert values - {"auto"} <= named


def verdicts(operation: str) -> dict[str, str]:
    """What is done with each parameter of an operation."""
    (section,) = (part for part in tables().split("## ") if part.startswith(f"{operation}\n"))
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (\w+) \|", section, re.MULTILINE)
    return dict(rows)


@pytest.mark.parametrize(
    ("operation", "name", "verdict"),
    [
        ("POST /v1/chat/completions", "mirostat", "refused"),
        ("POST /v1/responses", "response_format", "refused"),
        ("POST /v1/responses", "n", "refused"),
        ("POST /v1/messages", "mcp_servers", "refused"),
        ("POST /v1/messages", "response_format", "refused"),
        ("POST /v1/messages", "return_tokens_as_token_ids", "ignored"),
    ],
)
def test_the_table_says_what_is_done(operation: str, name: str, verdict: str) -> None:
    assert verdicts(operation)[name] == verdict


def test_what_would_change_an_answer_is_not_ignored() -> None:
    chat = verdicts("POST /v1/chat/completions")
    ignored = {name for name, verdict in chat.items() if verdict == "ignored"}

    assert not ignored & {"temperature", "functions", "suffix", "use_beam_search", "logit_bias"}
    assert {"metadata", "user"} <= ignored

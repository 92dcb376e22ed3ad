"""Generated parts of the pages are up to date."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from docs.site.compatibility import ENDPOINTS, tables
from docs.site.generate import PAGES, rendered
from docs.site.messages import message_tables
from docs.site.models import families, formats
from shared import messages
from shared.settings import WorkerSettings
from tests.support.pages import name_of
from worker.checkpoints.catalogue import MODELS
from worker.model.config import FAMILIES


@pytest.mark.parametrize("page", sorted(PAGES.rglob("*.md")), ids=name_of)
def test_a_page_is_what_would_be_generated(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert text == rendered(text), "run python -m docs.site.generate"


def test_every_parameter_of_every_body_is_in_its_table() -> None:
    sections = tables().split("## ")[1:]

    for endpoint, section in zip(ENDPOINTS, sections, strict=True):
        assert section.startswith(endpoint.path)
        missing = [name for name in endpoint.parameters if f"| `{name}` |" not in section]
        assert missing == []


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


def test_what_would_change_an_answer_is_not_ignored() -> None:
    chat = tables().split("## ")[1]
    ignored = {line.split("`")[1] for line in chat.splitlines() if "| ignored |" in line}

    assert not ignored & {"temperature", "functions", "suffix", "use_beam_search", "logit_bias"}
    assert {"metadata", "user"} <= ignored

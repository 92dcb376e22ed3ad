"""The page about the life of a request lists the modules that a request enters."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deployment.broker import RabbitNode, running_node
from tests.support.journeys import agent
from tests.support.journeys.request import PAGE, rendered, traced
from tests.support.pages import ROOT

_MODULE = re.compile(r"`((?:gateway|shared|worker)(?:\.\w+)+)`")


@pytest.fixture(scope="module")
def own_node() -> Iterator[RabbitNode]:
    """A broker with nothing but what these tests create."""
    with running_node() as node:
        yield node


def test_the_modules_that_the_page_names_exist() -> None:
    named = {ROOT / name.replace(".", "/") for name in _MODULE.findall(PAGE.read_text("utf-8"))}

    assert len(named) > 50
    assert [at for at in named if not (at.is_dir() or at.with_suffix(".py").is_file())] == []


@pytest.mark.rabbit
def test_the_page_lists_the_modules_that_a_request_enters(own_node: RabbitNode) -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert page == rendered(page, traced(own_node.url)), (
        "run python -m tests.support.journeys --write"
    )


@pytest.mark.rabbit
async def test_the_page_lists_the_messages_of_an_agents_chat(
    own_node: RabbitNode, smollm2: Path
) -> None:
    page = PAGE.read_text(encoding="utf-8")

    rows = await agent.travel(own_node.url, smollm2)

    assert page == agent.rendered(page, rows), "run python -m tests.support.journeys --write"

"""The page about the life of a request lists the modules that a request enters."""

import re
from pathlib import Path

import pytest

from tests.support.deployment.broker import RabbitNode
from tests.support.journeys import agent
from tests.support.journeys.request import PAGE, rendered, traced
from tests.support.pages import ROOT

_MODULE = re.compile(r"`((?:gateway|shared|worker)(?:\.\w+)+)`")


def test_the_modules_that_the_page_names_exist() -> None:
    named = {ROOT / name.replace(".", "/") for name in _MODULE.findall(PAGE.read_text("utf-8"))}

    assert len(named) > 50
    assert [at for at in named if not (at.is_dir() or at.with_suffix(".py").is_file())] == []


@pytest.mark.rabbit
def test_the_page_lists_the_modules_that_a_request_enters(own_broker: RabbitNode) -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert page == rendered(page, traced(own_broker.url)), (
        "run python -m tests.support.journeys --write"
    )


@pytest.mark.rabbit
async def test_the_page_lists_the_messages_of_an_agents_chat(
    own_broker: RabbitNode, smollm2: Path
) -> None:
    page = PAGE.read_text(encoding="utf-8")

    rows = await agent.travel(own_broker.url, smollm2)

    assert page == agent.rendered(page, rows), "run python -m tests.support.journeys --write"

"""The page about the life of a request lists the modules that a request enters."""

import pytest

from tests.support.deployment.broker import RabbitNode
from tests.support.journey import PAGE, rendered, traced


@pytest.mark.rabbit
def test_the_page_lists_the_modules_that_a_request_enters(own_broker: RabbitNode) -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert page == rendered(page, traced(own_broker.url)), (
        "run python -m tests.support.journey --write"
    )

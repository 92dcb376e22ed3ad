"""Traces real requests; with ``--write``, docs/life-of-a-request.md shows what they did."""

import asyncio
import logging
import sys

from tests.support.deployment.broker import running_node
from tests.support.journeys import agent
from tests.support.journeys.request import PAGE, rendered, show, traced
from worker.checkpoints import store

logging.getLogger("aiormq").setLevel(logging.CRITICAL)
with running_node() as node:
    journey = traced(node.url)
    rows = asyncio.run(agent.travel(node.url, store.resolve("smollm2")))
show(journey)
if "--write" in sys.argv[1:]:
    page = rendered(PAGE.read_text(encoding="utf-8"), journey)
    PAGE.write_text(agent.rendered(page, rows), encoding="utf-8")

"""A minute of what `python -m tests.system.soak` sends for half an hour."""

from pathlib import Path

import pytest

from tests.support.broker import RabbitNode
from tests.system.soak.run import Plan, soak

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(240)]


async def test_rude_traffic_ends_no_process_and_leaves_nothing(
    own_broker: RabbitNode, tmp_path: Path
) -> None:
    findings = await soak(own_broker, tmp_path, Plan(duration_s=60, num_questions=60))

    assert findings.faults == []
    assert findings.tally.errors == []
    assert findings.tally.num("exact") > 0

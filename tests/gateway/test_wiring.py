"""How long a gateway keeps logs follows from how long it waits for clients."""

import pytest

from gateway.wiring import TUNING


@pytest.mark.parametrize(("disconnect_grace_s", "expected_s"), [(0, 60), (5, 60), (300, 300)])
def test_a_log_outlasts_the_clients_that_may_return(
    disconnect_grace_s: float, expected_s: float
) -> None:
    assert TUNING.keep_log_s(disconnect_grace_s) == expected_s

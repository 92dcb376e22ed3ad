from gateway import app, server
from gateway.ledger import recorder
from gateway.store import database, state


def test_the_time_in_which_a_gateway_closes_covers_all_that_it_waits_for() -> None:
    waits_s = [
        *[app._CLEAN_UP_S] * 3,  # for batches and webhooks, for logs, and for what records usage
        app._LAST_WORDS_S,
        recorder._LAST_WRITES_S,
        state._LAST_WRITES_S,
        database._CLOSING_S,
        server._CLOSE_TIMEOUT_S,
    ]

    assert sum(waits_s) <= app.MAX_CLOSING_S

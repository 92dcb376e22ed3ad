"""The audit log."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.errors import StartupError
from shared.telemetry import audit, floods


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "audit.jsonl"
    handler = audit.write_to(path)
    yield path
    audit.logger.removeHandler(handler)
    handler.close()


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_is_a_line_of_json_and_its_owners_alone(file: Path) -> None:
    audit.record("API key revoked", tenant="alice", key_id="00aa", by="öp\n")

    [record] = records(file)
    assert record.pop("time")
    assert record == {
        "act": "API key revoked",
        "tenant": "alice",
        "key_id": "00aa",
        "by": "öp\n",
    }
    assert file.stat().st_mode & 0o077 == 0


@pytest.fixture
def summaries() -> list[Callable[[], None]]:
    """What writes the summaries of floods, at the end of their windows."""
    return []


@pytest.fixture
def refusals(summaries: list[Callable[[], None]]) -> audit.Refusals:
    limiter = floods.Limiter(
        audit.record_left_out, later=lambda _delay_s, summarise: summaries.append(summarise)
    )
    return audit.Refusals(limiter)


def test_a_flood_of_refusals_is_counted(
    file: Path, refusals: audit.Refusals, summaries: list[Callable[[], None]]
) -> None:
    for _ in range(1000):
        refusals.record("login refused", tenant="", key_id="")
    [summarise] = summaries
    summarise()

    *first, last = records(file)
    assert len(first) == floods.MAX_LINES
    assert (last["act"], last["of"]) == ("refusals left out", "login refused")
    assert last["num_left_out"] == 1000 - floods.MAX_LINES


def test_anonymous_refusals_do_not_hide_what_a_known_key_was_refused(
    file: Path, refusals: audit.Refusals
) -> None:
    for number in range(1000):
        refusals.record("login refused", tenant="", key_id="")
        if number % 100 == 0:
            refusals.record("access refused", tenant="alice", key_id="00aa")
            refusals.record("login refused", tenant="alice", key_id="00aa")

    named = [one["act"] for one in records(file) if one["key_id"] == "00aa"]
    assert named == ["access refused", "login refused"] * 10


def test_a_record_does_not_control_the_terminal_that_shows_it(file: Path) -> None:
    audit.record("API key added", tenant="a\x1b[2J\x9b2J\u202ex")

    assert file.read_text().rstrip("\n").isprintable()
    assert records(file)[0]["tenant"] == "a\x1b[2J\x9b2J\u202ex"


def test_a_file_that_is_moved_away_is_written_anew(file: Path) -> None:
    audit.record("API key added")
    file.rename(file.with_suffix(".1"))
    audit.record("API key revoked")

    assert [one["act"] for one in records(file)] == ["API key revoked"]


def test_an_audit_log_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="audit log"):
        audit.write_to(tmp_path / "no" / "audit.jsonl")


def test_records_are_logged_as_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    audit.record("API key added", tenant="alice")

    assert [(one.name, one.message) for one in caplog.records] == [
        ("warren.audit", "API key added")
    ]

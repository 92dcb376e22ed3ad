import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.batch.journal import Journal, Remote, noted
from shared.errors import InvalidRequest


def line(custom_id: str, status: int = 200, body: str = "") -> bytes:
    response = {"status_code": status, "request_id": "r", "body": {"text": body}}
    return json.dumps({"id": "x", "custom_id": custom_id, "response": response}).encode()


def test_what_was_appended_is_there_again(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "out", "digest") as journal:
        journal.append(line("a"))
        journal.append(line("b", status=400))

    with Journal.open(tmp_path / "out", "digest") as journal:
        assert "a" in journal
        assert "b" in journal
        assert len(journal) == 2
        assert journal.num_failed == 1


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
def test_requests_that_were_not_executed_did_not_fail(ending: str, tmp_path: Path) -> None:
    unexecuted = {
        "id": "x",
        "custom_id": "b",
        "response": None,
        "error": {"code": f"batch_{ending}", "message": "m"},
    }
    with Journal.open(tmp_path / "out", "digest") as journal:
        journal.append(line("a", status=400))
        journal.append(json.dumps(unexecuted).encode())

    with Journal.open(tmp_path / "out", "digest") as journal:
        assert (journal.num_failed, journal.num_unexecuted, journal.ending) == (1, 1, ending)


@given(cut=st.integers(0, 400))
def test_whatever_a_crash_cuts_off_the_lines_before_it_are_kept(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "out.part"
    output = path.with_name("out")
    with Journal.open(output, "digest") as journal:
        for name in "abc":
            journal.append(line(name))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    num_kept = max(0, whole[:cut].count(b"\n") - 1)

    with Journal.open(output, "digest") as journal:
        assert [name for name in "abc" if name in journal] == list("abc")[:num_kept]
        for name in "abc":
            journal.append(line(name))

    assert path.read_bytes() == whole


def test_a_second_answer_to_a_line_is_dropped(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "out", "digest") as journal:
        journal.append(line("a", body="first"))
        journal.append(line("a", body="second"))
        journal.finish(["a"])

    assert (tmp_path / "out").read_bytes() == line("a", body="first") + b"\n"


def test_the_output_has_the_order_of_the_input(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "out", "digest") as journal:
        for name in ("c", "a", "b"):
            journal.append(line(name, body="é\\n"))
        journal.finish(["a", "b", "c"])

    answers = [json.loads(text) for text in (tmp_path / "out").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_journal_of_another_input_is_left_alone(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "out", "digest") as journal:
        journal.append(line("a"))
    before = (tmp_path / "out.part").read_bytes()

    with pytest.raises(InvalidRequest, match="another input"):
        Journal.open(tmp_path / "out", "other")

    assert (tmp_path / "out.part").read_bytes() == before


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_journal_of_the_other_kind_of_run_is_left_alone(is_remote: bool, tmp_path: Path) -> None:
    with Journal.open(tmp_path / "out", "digest", is_remote=is_remote) as journal:
        journal.append(line("a"))
    before = (tmp_path / "out.part").read_bytes()

    with pytest.raises(InvalidRequest, match=r"of a run with(out)? --url"):
        Journal.open(tmp_path / "out", "digest", is_remote=not is_remote)

    assert (tmp_path / "out.part").read_bytes() == before


def test_the_last_note_counts_and_is_no_answer(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "out", "digest", is_remote=True) as journal:
        journal.note(Remote(upload_id="upload_1", part_ids=("part_1",)))
        journal.append(line("a"))
        journal.note(Remote(file_id="file-1", window="24h"))

    with Journal.open(tmp_path / "out", "digest", is_remote=True) as journal:
        assert journal.remote == noted(tmp_path / "out") == Remote(file_id="file-1", window="24h")
        assert len(journal) == 1


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.part").write_text("precious\n")

    with pytest.raises(InvalidRequest, match="not a journal"):
        Journal.open(tmp_path / "out", "digest")

    assert (tmp_path / "out.part").read_text() == "precious\n"


def test_two_runs_do_not_share_a_journal(tmp_path: Path) -> None:
    with (
        Journal.open(tmp_path / "out", "digest"),
        pytest.raises(InvalidRequest, match="another run"),
    ):
        Journal.open(tmp_path / "out", "digest")

"""The file of API keys: what it contains, and what is refused."""

import base64
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.intake.keys.api_key import ApiKey, parse_line
from gateway.intake.keys.key_file import KeyFile, read_keys
from shared.errors import StartupError

DIGEST = "0" * 64


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys")


def id_of(key: str) -> str:
    return key.split("-")[1]


def test_a_line_has_every_field_of_a_key() -> None:
    key = ApiKey(
        "00aa",
        "alice",
        DIGEST,
        "2026-11-21",
        label="Bob's app, № 1",
        expires=datetime(2027, 1, 31, 12, tzinfo=UTC),
        scopes=("generate", "operator"),
        models=("smollm2", "org/*"),
        requests_per_minute=60,
        tokens_per_minute=1000,
        max_concurrent=3,
        max_detached=4,
        max_tokens=5,
        previous="1" * 64,
        previous_until=datetime(2026, 12, 1, tzinfo=UTC),
    )

    assert parse_line(key.line) == key


def test_lines_of_earlier_versions_are_keys_without_limits() -> None:
    key = parse_line(f"00aa  alice {DIGEST} 2026-11-21  # of the web app")

    assert key == ApiKey("00aa", "alice", DIGEST, "2026-11-21")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("nonsense", "expected ID TENANT SHA256 CREATED"),
        ("00aa alice 00 2026-11-21", "SHA256: expected"),
        (f"00aa a/b {DIGEST} 2026-11-21", "TENANT: expected"),
        (f"00aa alice {DIGEST} 2026-11-21 forever", "'forever': expected NAME=VALUE"),
        (f"00aa alice {DIGEST} 2026-11-21 rpm=1", "unknown field 'rpm'"),
        (f"00aa alice {DIGEST} 2026-11-21 max_tokens=0", "max_tokens=0: expected a positive"),
        (f"00aa alice {DIGEST} 2026-11-21 max_tokens=1 max_tokens=2", "given twice"),
        (f"00aa alice {DIGEST} 2026-11-21 expires=soon", "expires=soon: expected a date"),
        (f"00aa alice {DIGEST} 2026-11-21 scopes=all", "scopes=all: 'all' is not one of"),
        (f'00aa alice {DIGEST} 2026-11-21 label="x', "No closing quotation"),
    ],
)
def test_a_fault_names_its_line_and_field(file: KeyFile, line: str, fault: str) -> None:
    file.path.write_text(f"# keys\n{line}\n")

    with pytest.raises(StartupError) as raised:
        read_keys(file.path)

    assert str(raised.value).startswith(f"{file.path}:2: the keys cannot be used: ")
    assert fault in str(raised.value)


def test_two_keys_of_one_id_are_refused(file: KeyFile) -> None:
    file.path.write_text(f"00aa alice {DIGEST} x\n00aa bob {DIGEST} x\n")

    with pytest.raises(StartupError, match=r"keys:2: .*duplicate key id 00aa"):
        read_keys(file.path)


def test_what_is_not_text_is_refused(file: KeyFile) -> None:
    file.path.write_bytes(b"\xff")

    with pytest.raises(StartupError, match="not text"):
        read_keys(file.path)


def test_no_key_of_a_missing_file_is_changed(file: KeyFile) -> None:
    for change in (lambda: file.rotate("00aa", timedelta()), lambda: file.revoke("00aa")):
        with pytest.raises(StartupError, match="cannot be used: No such file or directory"):
            change()

    assert not file.path.exists()


def test_the_file_does_not_hold_the_key_and_is_its_owners_alone(file: KeyFile) -> None:
    key = file.add("alice")

    assert key.split("-", 2)[2] not in file.path.read_text()
    assert file.path.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file to another user")
def test_the_file_stays_its_owners(file: KeyFile) -> None:
    file.add("alice")
    os.chown(file.path, 12345, 23456)
    file.path.chmod(0o640)

    file.add("bob")

    status = file.path.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (12345, 23456, 0o640)


def test_a_key_has_256_random_bits(file: KeyFile) -> None:
    keys = [file.add("alice").split("-", 2)[2] for _ in range(8)]

    assert {len(base64.urlsafe_b64decode(f"{key}=")) for key in keys} == {32}
    assert len(set(keys)) == len(keys)


def test_remarks_survive_changes(file: KeyFile) -> None:
    file.path.write_text("# of the web app\n\n")
    key = file.add("alice")
    file.path.write_text(f"{file.path.read_text().rstrip()}  # Alice's\n")

    file.rotate(id_of(key), timedelta(hours=1))
    assert file.path.read_text().endswith("Z  # Alice's\n")
    file.revoke(id_of(key))

    assert file.path.read_text() == "# of the web app\n\n"


def test_a_key_is_added_after_a_line_that_has_no_end(file: KeyFile) -> None:
    file.path.write_text(f"00aa alice {DIGEST} x")

    file.add("bob")

    assert [key.tenant for key in read_keys(file.path).values()] == ["alice", "bob"]


@pytest.mark.parametrize("tenant", ["", "a b", "a#b", "ü", "x" * 129])
def test_a_tenant_must_have_a_name(file: KeyFile, tenant: str) -> None:
    with pytest.raises(StartupError):
        file.add(tenant)


@pytest.mark.parametrize("label", ["a\u2028b", "a\x85b", "Team #1", "it's # two"])
def test_a_key_has_any_label_however_often_it_is_rotated(file: KeyFile, label: str) -> None:
    key = file.add("alice", label=label)
    for _ in range(3):
        key = file.rotate(id_of(key), timedelta(hours=1))
    (rotated,) = read_keys(file.path).values()

    assert rotated.label == label
    assert file.path.read_text() == rotated.line


def test_an_unknown_key_is_neither_rotated_nor_revoked(file: KeyFile) -> None:
    file.add("alice")

    for change in (file.revoke, lambda one: file.rotate(one, timedelta(0))):
        with pytest.raises(StartupError, match="00"):
            change("00")


@pytest.mark.parametrize(
    ("models", "model", "is_allowed"),
    [((), "any", True), (("a", "b*"), "bc", True), (("a", "b*"), "ab", False)],
)
def test_models_are_names_or_patterns(
    models: tuple[str, ...], model: str, is_allowed: bool
) -> None:
    assert ApiKey("", "", "", "", models=models).allows_model(model) is is_allowed

"""The doctor's findings about the database, the storage of files and the data directory."""

from pathlib import Path

from cli.doctor.findings import Finding
from cli.doctor.stores import check_stores
from shared import settings
from shared.settings import GatewaySettings
from tests.support.deployment.postgres import PostgresServer


def check(**options: object) -> dict[str, Finding]:
    loaded = settings.load(GatewaySettings, **options)
    return {finding.check: finding for finding in check_stores(loaded)}


def test_stores_that_can_be_used_are_well(postgres: PostgresServer, tmp_path: Path) -> None:
    found = check(database_url=postgres.create_database(), files_url=tmp_path.as_uri())

    assert {name: one.status for name, one in found.items()} == {"database": "ok", "files": "ok"}
    assert list(tmp_path.iterdir()) == []


def test_stores_that_cannot_be_used_are_failures_with_their_causes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    url = "postgresql://nobody:secret@127.0.0.1:1/none"

    found = check(database_url=url, files_url=(tmp_path / "file" / "no").as_uri())

    assert {one.status for one in found.values()} == {"failure"}
    assert "ConnectionRefusedError" in found["database"].detail
    assert "secret" not in found["database"].detail
    assert "Not a directory" in found["files"].detail


def test_a_data_directory_need_not_exist(tmp_path: Path) -> None:
    (found,) = check(data_dir=tmp_path / "new" / "data").values()

    assert found.check == "data dir"
    assert found.status in ("ok", "warning")
    assert "GiB free" in found.detail


def test_a_data_directory_that_cannot_be_created_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    (found,) = check(data_dir=tmp_path / "file" / "data").values()

    assert found.status == "failure"
    assert f"{tmp_path / 'file'} is not a directory" in found.detail

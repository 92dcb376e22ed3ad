"""Which keys of the database a gateway accepts, beside those of its file."""

from pathlib import Path

import pytest

from gateway.intake.keys.accepted import Keys
from gateway.intake.keys.api_key import new_key
from gateway.intake.keys.key_file import KeyFile
from gateway.intake.keys.tenant_limits import TenantLimits
from shared.errors import InvalidApiKey, Unavailable


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    file = KeyFile(tmp_path / "keys")
    file.add("first")
    return file


def test_keys_of_file_and_database_are_accepted(file: KeyFile) -> None:
    of_file = file.add("ops")
    secret, key = new_key("alice")
    keys = Keys(file.path)

    keys.accept_stored({key.key_id: key}, {})

    assert keys.find(f"Bearer {of_file}").tenant == "ops"
    assert keys.find(f"Bearer {secret}") == key
    assert keys.is_in_file(key.key_id) is False


def test_keys_of_file_and_database_have_the_limits_of_their_tenant(file: KeyFile) -> None:
    of_file, (secret, key) = file.add("alice"), new_key("alice")
    keys = Keys(file.path)

    keys.accept_stored({key.key_id: key}, {"alice": TenantLimits(max_concurrent=3)})
    limited = [keys.find(f"Bearer {one}") for one in (of_file, secret)]
    keys.accept_stored({key.key_id: key}, {})

    assert [key.of_tenant.max_concurrent for key in limited] == [3, 3]
    assert all(key.limits_concurrency for key in limited)
    assert not keys.find(f"Bearer {of_file}").limits_concurrency


def test_a_key_that_left_the_database_is_refused(file: KeyFile) -> None:
    secret, key = new_key("alice")
    keys = Keys(file.path)
    keys.accept_stored({key.key_id: key}, {})

    keys.accept_stored({}, {})

    with pytest.raises(InvalidApiKey):
        keys.find(f"Bearer {secret}")


def test_a_change_of_the_file_leaves_the_keys_of_the_database(
    file: KeyFile,
) -> None:
    secret, key = new_key("alice")
    keys = Keys(file.path, look_interval_s=0.0)
    keys.accept_stored({key.key_id: key}, {})

    added = file.add("bob")
    found = keys.find(f"Bearer {added}").tenant
    file.path.write_text("this is no key\n")

    assert found == "bob"
    assert keys.is_broken
    assert keys.find(f"Bearer {secret}") == key


def test_a_key_that_may_be_one_of_an_unread_database_is_not_called_wrong(file: KeyFile) -> None:
    of_file, (secret, _) = file.add("ops"), new_key("alice")
    keys = Keys(file.path)

    keys.expect_stored()

    assert keys.find(f"Bearer {of_file}").tenant == "ops"
    with pytest.raises(Unavailable, match="database is away"):
        keys.find(f"Bearer {secret}")
    with pytest.raises(InvalidApiKey):
        keys.find("")


def test_keys_of_a_database_that_is_away_are_accepted_for_a_bounded_time(file: KeyFile) -> None:
    secret, key = new_key("alice")
    for_long, for_no_time = Keys(file.path), Keys(file.path, stored_valid_s=-1.0)
    for keys in (for_long, for_no_time):
        keys.accept_stored({key.key_id: key}, {})

    assert for_long.find(f"Bearer {secret}") == key
    with pytest.raises(Unavailable):
        for_no_time.find(f"Bearer {secret}")

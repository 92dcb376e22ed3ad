"""API keys in the database."""

from dataclasses import replace
from itertools import pairwise

import pytest

from gateway.intake.keys.api_key import new_key
from gateway.store.tenants.keys import StoredKeys
from shared.errors import NotFound


async def test_a_key_is_what_was_stored_until_it_is_changed_and_removed(
    stored_keys: StoredKeys,
) -> None:
    _, key = new_key("alice", label="Web app", max_tokens=9)
    await stored_keys.add(key)

    changed = await stored_keys.change(key.key_id, lambda old: replace(old, max_tokens=5))
    known = await stored_keys.all()
    removed = await stored_keys.remove(key.key_id)

    assert known == {key.key_id: changed}
    assert (changed.label, changed.max_tokens, removed) == ("Web app", 5, changed)
    assert await stored_keys.all() == {}


async def test_every_change_makes_another_version(stored_keys: StoredKeys) -> None:
    (_, first), (_, second) = new_key("alice"), new_key("bob")
    versions = [await stored_keys.version()]
    for change in (
        lambda: stored_keys.add(first),
        lambda: stored_keys.change(first.key_id, lambda old: old),
        lambda: stored_keys.remove(first.key_id),
        lambda: stored_keys.add(second),
    ):
        await change()
        versions.append(await stored_keys.version())

    assert [before for before, after in pairwise(versions) if before == after] == []


async def test_an_unknown_key_is_neither_changed_nor_removed(stored_keys: StoredKeys) -> None:
    with pytest.raises(NotFound):
        await stored_keys.change("ab", lambda old: old)
    with pytest.raises(NotFound):
        await stored_keys.remove("ab")

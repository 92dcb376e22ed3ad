from typing import Any

import pytest

from gateway.store.database import Database
from gateway.store.files.blobs import Blobs
from gateway.store.files.exact_answers import ExactAnswer, ExactAnswers

SMALL, LARGE = b"small", bytes(range(256)) * 257
"""A large answer has more than 64 KiB."""
NOW, KEPT_S = 1_800_000_000.0, 100.0
NO_LIMIT = 1 << 40


@pytest.fixture
def answers(database: Database, blobs: Blobs) -> ExactAnswers:
    return ExactAnswers(database, blobs)


def answer(name: str, body: bytes = SMALL, *, at: float = NOW, **more: Any) -> ExactAnswer:
    times = {"created_at": at, "expires_at": at + KEPT_S}
    return ExactAnswer(**{"execution_id": name, "tenant": "a", "body": body, **times, **more})


async def blob_of(blobs: Blobs, name: str) -> bytes:
    return b"".join([part async for part in blobs.parts(f"exact-{name}")])


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
async def test_an_answer_is_what_was_written_until_it_expires(
    answers: ExactAnswers, body: bytes
) -> None:
    await answers.write(answer("cmpl-1", body))

    assert await answers.read("cmpl-1", NOW + KEPT_S - 1) == body
    assert await answers.read("cmpl-1", NOW + KEPT_S) is None
    assert await answers.read("cmpl-2", NOW) is None
    assert await answers.num_bytes() == len(body)


async def test_a_large_answer_is_a_blob(answers: ExactAnswers, blobs: Blobs) -> None:
    await answers.write(answer("cmpl-large", LARGE))
    await answers.write(answer("cmpl-small"))

    assert await blob_of(blobs, "cmpl-large") == LARGE
    with pytest.raises(FileNotFoundError):
        await blob_of(blobs, "cmpl-small")


async def test_a_large_answer_without_its_blob_is_none(answers: ExactAnswers, blobs: Blobs) -> None:
    await answers.write(answer("cmpl-1", LARGE))

    await blobs.delete("exact-cmpl-1")

    assert await answers.read("cmpl-1", NOW) is None


async def test_the_first_of_two_answers_stays(answers: ExactAnswers) -> None:
    await answers.write(answer("cmpl-1"))
    await answers.write(answer("cmpl-1", at=NOW + KEPT_S / 2))

    assert await answers.read("cmpl-1", NOW + KEPT_S) is None


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
async def test_an_answer_replaces_an_expired_answer_that_was_not_swept(
    answers: ExactAnswers, blobs: Blobs, body: bytes
) -> None:
    await answers.write(answer("cmpl-1", LARGE))
    await answers.write(answer("cmpl-1", body, at=NOW + KEPT_S))

    assert await answers.read("cmpl-1", NOW + KEPT_S) == body
    assert await answers.num_bytes() == len(body)
    assert await answers.sweep(NOW + 2 * KEPT_S, NO_LIMIT) == 1
    with pytest.raises(FileNotFoundError):
        await blob_of(blobs, "cmpl-1")


async def test_a_sweep_deletes_what_has_expired(answers: ExactAnswers, blobs: Blobs) -> None:
    await answers.write(answer("cmpl-old", LARGE))
    await answers.write(answer("cmpl-new", at=NOW + 1))

    num_deleted = await answers.sweep(NOW + KEPT_S, NO_LIMIT)

    assert num_deleted == 1
    assert await answers.num_bytes() == len(SMALL)
    assert await answers.read("cmpl-new", NOW + KEPT_S) == SMALL
    with pytest.raises(FileNotFoundError):
        await blob_of(blobs, "cmpl-old")


async def test_a_sweep_deletes_the_oldest_until_the_others_fit(
    answers: ExactAnswers, blobs: Blobs
) -> None:
    for number, body in enumerate([LARGE, SMALL, LARGE, SMALL]):
        await answers.write(answer(f"cmpl-{number}", body, at=NOW + number))

    num_deleted = await answers.sweep(NOW + 4, len(LARGE) + len(SMALL))

    assert num_deleted == 2
    left = [await answers.read(f"cmpl-{number}", NOW + 4) for number in range(4)]
    assert left == [None, None, LARGE, SMALL]
    with pytest.raises(FileNotFoundError):
        await blob_of(blobs, "cmpl-0")


async def test_the_answers_of_a_tenant_are_erased(answers: ExactAnswers, blobs: Blobs) -> None:
    await answers.write(answer("cmpl-a", LARGE))
    await answers.write(answer("cmpl-b", tenant="b"))

    assert await answers.erase("a") == 1

    assert await answers.read("cmpl-a", NOW) is None
    assert await answers.read("cmpl-b", NOW) == SMALL
    with pytest.raises(FileNotFoundError):
        await blob_of(blobs, "cmpl-a")

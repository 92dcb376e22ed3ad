"""Directories that are built once: complete or absent, whichever process builds or dies."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.errors import StartupError
from worker.checkpoints.cache import build_once, check_owned, link

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


def write_slowly(partial: Path) -> None:
    (partial / "a").write_text("a")
    time.sleep(0.1)
    (partial / "b").write_text("b")


def build_and_die(directory: Path) -> None:
    def build(partial: Path) -> None:
        (partial / "half").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)

    build_once(directory, build)


def test_of_many_who_ask_at_once_one_builds_and_all_see_it_complete(tmp_path: Path) -> None:
    builders: list[str] = []

    def ask(name: str) -> set[str]:
        def build(partial: Path) -> None:
            builders.append(name)
            write_slowly(partial)

        return {path.name for path in build_once(tmp_path / "model", build).iterdir()}

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(ask, "abcdefgh"))

    assert len(builders) == 1
    assert seen == [{"a", "b"}] * 8


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_build_that_fails_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def build(partial: Path) -> None:
        (partial / "half").write_text("")
        raise error

    with pytest.raises(error):
        build_once(tmp_path / "model", build)

    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_what_a_killed_builder_left_does_not_show_in_the_next_build(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=build_and_die, args=(tmp_path / "model",)
    )
    process.start()
    process.join()
    assert (tmp_path / ".model.partial" / "half").exists()

    directory = build_once(tmp_path / "model", write_slowly)

    assert {path.name for path in directory.iterdir()} == {"a", "b"}
    assert not (tmp_path / ".model.partial").exists()


def test_a_name_moves_from_one_directory_to_another(tmp_path: Path) -> None:
    for version in ("old", "new"):
        (tmp_path / "converted" / version).mkdir(parents=True)
        link(tmp_path / "models" / "name", tmp_path / "converted" / version)

    assert (tmp_path / "models" / "name").resolve() == tmp_path / "converted" / "new"
    assert len(list((tmp_path / "models").iterdir())) == 1


@pytest.mark.parametrize(("name", "mode"), [(".", 0o777), ("b", 0o666)])
def test_a_model_that_everyone_may_change_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    directory = build_once(tmp_path / "model", write_slowly)
    (directory / name).chmod(mode)

    with pytest.raises(StartupError, match="others may write"):
        build_once(directory, write_slowly)


@needs_root
@pytest.mark.parametrize(("name", "mode"), [(".", 0o775), ("b", 0o664)])
def test_a_model_that_another_group_may_change_is_refused(
    tmp_path: Path, name: str, mode: int
) -> None:
    directory = build_once(tmp_path / "model", write_slowly)
    os.chown(directory / name, -1, 12345)
    (directory / name).chmod(mode)

    with pytest.raises(StartupError, match="others may write"):
        build_once(directory, write_slowly)


@needs_root
@pytest.mark.parametrize("name", [".", "b"])
def test_a_model_of_another_user_is_refused(tmp_path: Path, name: str) -> None:
    directory = build_once(tmp_path / "model", write_slowly)
    os.chown(directory / name, 12345, -1)

    with pytest.raises(StartupError, match="belongs to another user"):
        build_once(directory, write_slowly)


@needs_root
def test_the_group_of_a_kubernetes_volume_is_the_workers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build_once(tmp_path / "model", write_slowly)
    for path in (directory, *directory.iterdir()):
        os.chown(path, 10001, 10001)
        path.chmod(path.stat().st_mode | 0o060)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    monkeypatch.setattr(os, "getegid", lambda: 10001)

    check_owned(directory)


def test_what_is_built_is_writable_by_its_owner_alone(tmp_path: Path) -> None:
    def build(partial: Path) -> None:
        write_slowly(partial)
        (partial / "a").chmod(0o664)

    directory = build_once(tmp_path / "model", build)

    assert not any(path.stat().st_mode & 0o022 for path in (directory, *directory.iterdir()))

"""What is compiled for which processor, and the errors if it cannot be."""

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.native import build as module
from kernels.native.build import LibraryUnavailable, best_variant, build, limit_variants
from kernels.native.library import Library, library


def test_the_second_start_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(best_variant())
    monkeypatch.setenv("PATH", "")
    assert build(best_variant()) == first


def test_without_a_compiler_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LibraryUnavailable, match=r"no C\+\+ compiler: install g\+\+"):
        build("avx2", directory=tmp_path)


def test_another_processor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(LibraryUnavailable, match="x86-64 and ARM64, and this processor is riscv64"):
        best_variant()


def test_arm_has_a_variant_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset({"asimd", "asimddp", "fphp"}))
    assert best_variant() == "neon"

    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset({"asimd"}))

    with pytest.raises(LibraryUnavailable, match="the processor has no asimddp, fphp"):
        best_variant()


def test_without_its_headers_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        "#!/bin/sh\necho 'fatal error: simde/x86/avx2.h: No such file' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    with pytest.raises(LibraryUnavailable, match="install libsimde-dev"):
        build("neon", directory=tmp_path / "built")


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    with pytest.raises(LibraryUnavailable, match="out of luck"):
        build("avx2", directory=tmp_path / "built")
    assert not list((tmp_path / "built").iterdir())


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that writes a fixed text instead of a library."""
    path = tmp_path / "g++"
    path.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho honest >"$2"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")


@pytest.mark.usefixtures("compiler")
def test_a_library_that_others_may_have_changed_is_compiled_again(tmp_path: Path) -> None:
    directory = tmp_path / "built"
    library = build("avx2", directory=directory)
    library.write_text("forged")
    library.chmod(0o777)
    directory.chmod(0o777)

    again = build("avx2", directory=directory)

    assert again.read_text() == "honest\n"
    assert (again.stat().st_mode | directory.stat().st_mode) & 0o077 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
@pytest.mark.usefixtures("compiler")
def test_libraries_of_another_user_are_not_run(tmp_path: Path) -> None:
    directory = tmp_path / "built"
    library = build("avx2", directory=directory)
    os.chown(library, 12345, -1)
    library.write_text("forged")
    assert build("avx2", directory=directory).read_text() == "honest\n"

    os.chown(directory, 12345, -1)

    with pytest.raises(LibraryUnavailable, match="belongs to another user"):
        build("avx2", directory=directory)


def test_a_library_that_several_need_at_once_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler, calls = tmp_path / "g++", tmp_path / "calls"
    compiler.write_text(
        "#!/bin/sh\n"
        f"echo called >>{calls}\n"
        'while [ "$1" != -o ]; do shift; done\n'
        'sleep 0.1; echo honest >"$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")

    with ThreadPoolExecutor() as pool:
        built = [pool.submit(build, "avx2", directory=tmp_path / "built") for _ in range(4)]

    assert {one.result().read_text() for one in built} == {"honest\n"}
    assert calls.read_text().splitlines() == ["called"]


def test_a_compiler_that_never_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.1)

    with pytest.raises(LibraryUnavailable, match="timed out"):
        build("avx2", directory=tmp_path / "built")


def test_a_cache_that_cannot_be_used_makes_the_library_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LibraryUnavailable, match="Not a directory"):
        build("avx2", directory=tmp_path / "file" / "built")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(LibraryUnavailable, match="determine home directory"):
        build("avx2")


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The library's place in an empty cache, into which a compiler copies the library."""
    path = tmp_path / "g++"
    compiled = build(best_variant())
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "{compiled}" "$2"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "BUILT", tmp_path)
    return build(best_variant())


def test_a_damaged_library_of_the_cache_is_compiled_again(cached: Path) -> None:
    cached.write_bytes(b"")

    loaded = library.__wrapped__()

    assert loaded.lanes > 1
    assert cached.stat().st_size > 0


def test_a_library_that_cannot_be_loaded_is_unavailable(cached: Path, tmp_path: Path) -> None:
    cached.write_bytes(b"")
    (tmp_path / "g++").write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: >"$2"\n')

    with pytest.raises(LibraryUnavailable, match=r"cannot be loaded: .*too short"):
        library.__wrapped__()


def test_every_variant_needs_what_it_is_compiled_for() -> None:
    assert list(module.VARIANTS) == ["avx512", "avx2", "neon"]
    assert "avx512_bf16" in module.VARIANTS["avx512"].flags


def test_variants_above_the_limit_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_allowed", list(module.VARIANTS))
    monkeypatch.setattr(
        module,
        "cpu_flags",
        lambda: frozenset().union(*(one.flags for one in module.VARIANTS.values())),
    )

    unlimited = best_variant()
    limit_variants("avx2")

    assert (unlimited, best_variant()) == ("avx512", "avx2")


def test_a_team_is_shared_by_those_who_want_as_many_threads(native: Library) -> None:
    assert native.team(2) == native.team(2) != native.team(3)


def test_variants_in_one_process_share_no_variables() -> None:
    """Libraries of a process share GNU's unique symbols, and the variants' differ in size."""
    symbols = subprocess.run(
        ["nm", "--demangle", build(best_variant())], capture_output=True, text=True, check=True
    ).stdout

    assert " T warren_forward\n" in symbols
    assert not [line for line in symbols.splitlines() if " u " in line and " warren::" in line]

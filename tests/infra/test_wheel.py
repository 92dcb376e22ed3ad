"""The wheel works in any environment and folder, whatever names other packages there have."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
NAMES = sorted({name.partition(".")[0] for name in PACKAGES})
SHOWS_MODULES = "from warren import LLM, Client; print(LLM.__module__, Client.__module__)"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the wheel, and with this environment's
    distributions."""
    wheels, home = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("environment")
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", f"--wheel-dir={wheels}"]
    subprocess.run([*PIP, *build, str(copied(wheels / "source"))], check=True)
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    (wheel,) = wheels.glob("*.whl")
    install = ["--python", str(home), "install", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*PIP, *install, str(wheel)], check=True)
    (site / "others.pth").write_text("\n".join(others()))
    return home / "bin" / "python"


def copied(directory: Path) -> Path:
    """The files of the checkout from which the wheel is built: a build writes beside them."""
    directory.mkdir()
    for name in ["pyproject.toml", "README.md", "LICENSE", "warren.py", "infra", *NAMES]:
        (directory / name).symlink_to(ROOT / name)
    return directory


def others() -> list[str]:
    """The folders of this environment's distributions other than Warren."""
    found = {str(Path(str(one.locate_file(""))).resolve()) for one in distributions()}
    return sorted(folder for folder in found if Path(folder) != ROOT) or [
        sysconfig.get_path("purelib")
    ]


def run(python: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    environment = kept | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [str(python), *args], cwd=folder, env=environment, text=True, capture_output=True
    )


def test_the_wheel_installs_one_import_package(python: Path) -> None:
    (site,) = python.parents[1].glob("lib/python*/site-packages")

    (tops,) = site.glob("warren-*.dist-info/top_level.txt")
    installed = {path.name for path in site.iterdir() if not path.suffix}

    assert tops.read_text() == "warren\n"
    assert installed - {"pip", "setuptools", "_distutils_hack", "pkg_resources"} == {"warren"}


def test_other_packages_may_have_the_names_of_warrens(python: Path, tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise AssertionError('not Warren')")

    shown = run(python, tmp_path, "-c", SHOWS_MODULES)
    helped = run(python, tmp_path, "-m", "warren", "serve", "--help")

    assert (shown.stdout, shown.stderr) == (
        "warren.worker.offline warren.shared.client.plain\n",
        "",
    )
    assert (helped.returncode, helped.stderr) == (0, "")


def test_it_serves_from_any_folder(python: Path, tmp_path: Path, smollm2: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise AssertionError('not Warren')")

    options = ["--model", str(smollm2), "--ask", "Where are you?", "--once", "--port=0"]
    options += ["--log-level=warning", f"--data-dir={tmp_path}"]
    served = run(python, tmp_path, "-m", "warren", "serve", *options)

    assert (served.returncode, served.stderr) == (0, "")
    assert "Where are you?" in served.stdout


def test_a_checkout_names_the_package_that_hides_its_own(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").touch()
    program = "import warren; warren.SamplingParams"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])

    ended = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        capture_output=True,
    )

    assert f"ImportError: {tmp_path}/shared hides Warren's package 'shared'" in ended.stderr

"""The documentation builds without a warning, and its pages load nothing from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
_LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?([^\"' >]+)[^>]*>")
_CANONICAL = re.compile(r"<link[^>]*rel=[\"']?canonical")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the built pages."""
    directory = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [
            *(sys.executable, "-m", "mkdocs", "build", "--strict"),
            *("--config-file", CONFIG, "--site-dir", directory),
        ],
        text=True,
        capture_output=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return directory


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    foreign = [
        (page.name, match[1])
        for page in site.rglob("*.html")
        for match in _LOADED.finditer(page.read_text())
        if match[1].startswith(("http:", "https:", "//")) and not _CANONICAL.match(match[0])
    ]

    assert foreign == []


def test_pages_link_to_files_and_not_to_directories(site: Path) -> None:
    """Pages that are opened from disk have no server that would resolve a directory to its
    index."""
    home = (site / "index.html").read_text()

    assert 'href="quickstart.html"' in home

"""The documentation for tests: pages, fenced blocks, and the comments before them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_OTHERS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md", "examples/README.md")
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in _OTHERS),
]
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```\n", re.DOTALL
)


class Block(NamedTuple):
    """A fenced block of a page."""

    mark: str
    """The text of the comment before it; empty if there is none."""
    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return blocks_of(page.read_text(encoding="utf-8"))


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a part of a page, in order."""
    return [
        Block(match["mark"] or "", match["kind"], match["text"]) for match in _BLOCK.finditer(text)
    ]


def commands(page: Path) -> Iterator[str]:
    """The commands of a page's console blocks, each on one line."""
    for block in blocks(page):
        if block.kind == "console":
            text = block.text.replace("\\\n", " ")
            yield from (line[2:] for line in text.splitlines() if line.startswith("$ "))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))

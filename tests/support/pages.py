"""The documentation for tests: pages, fenced blocks, and the comments before them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GATEWAY = "http://127.0.0.1:8000"
"""The gateway that the pages' commands call."""
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
    """The commands of a page's console blocks, each on a single line."""
    for block in blocks(page):
        if block.kind == "console":
            text = block.text.replace("\\\n", " ")
            yield from (line[2:] for line in text.splitlines() if line.startswith("$ "))


def requests(script: str) -> Iterator[tuple[str, str]]:
    """The method and the path, without its query, of each request to `GATEWAY` that a script sends
    with curl."""
    for command in re.split(r"\bcurl\b", script.replace("\\\n", " "))[1:]:
        called = re.search(rf"{re.escape(GATEWAY)}(/[^\s\"'?)]*)", command)
        if called is None:
            continue
        method = re.search(r"(?:--request|-X) ([A-Z]+)", command)
        has_body = re.search(r" (?:-d|-F|--data|--form) ", command) is not None
        yield (method[1] if method else "POST" if has_body else "GET"), called[1]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))

"""Writes the parts of the pages that the code decides: ``python -m docs.site.generate``.

A test fails while a page differs from what this module would write.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from cli.options import table
from docs.site.compatibility import tables
from docs.site.metrics import metric_tables

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs"

_BLOCKS: Mapping[str, Callable[[], str]] = {
    "compatibility": tables,
    "metrics": metric_tables,
    "settings": table,
}
"""What stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
_BLOCK = re.compile(r"(<!-- (?P<name>\w+) -->\n).*?(<!-- /(?P=name) -->)", re.DOTALL)
_FILE = re.compile(r"(<!-- file: (?P<path>\S+) -->\n```\w+\n).*?(```\n)", re.DOTALL)


def rendered(page: str) -> str:
    """The text of a page with its generated parts as they are now."""
    page = _BLOCK.sub(lambda match: f"{match[1]}{_BLOCKS[match['name']]()}\n{match[3]}", page)
    return _FILE.sub(lambda match: f"{match[1]}{_read(match['path'])}{match[3]}", page)


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


if __name__ == "__main__":
    for path in PAGES.rglob("*.md"):
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")

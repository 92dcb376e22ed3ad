"""Writes the parts of the pages that the code decides: ``python -m docs.site.generate``.

A test fails while a page, or docker-compose.yml, differs from what this module would write.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from cli.options import table
from docs.site.clients import client_table
from docs.site.compatibility import tables
from docs.site.engines import capabilities, engine_table
from docs.site.messages import message_tables
from docs.site.metrics import metric_tables
from docs.site.models import (
    blocks,
    families,
    files_read_as_they_are,
    formats,
    known_models,
    quality,
)
from docs.site.python import reference
from docs.site.scaling import (
    announcement_table,
    cost_table,
    curve_table,
    error_sentence,
    price,
    size_table,
    wakeup_table,
)
from docs.site.shapes import shapes_table
from docs.site.stages import stage_table
from shared.settings import CommonSettings, GatewaySettings, WorkerSettings, variable

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs"
COMPOSE = ROOT / "docker-compose.yml"


_BLOCKS: Mapping[str, Callable[[], str]] = {
    "announcements": announcement_table,
    "clients": client_table,
    "compatibility": tables,
    "capabilities": capabilities,
    "costs": cost_table,
    "errors": error_sentence,
    "curve": curve_table,
    "engines": engine_table,
    "messages": message_tables,
    "metrics": metric_tables,
    "models": known_models,
    "price": price,
    "python": reference,
    "sizes": size_table,
    "families": families,
    "formats": formats,
    "architectures": files_read_as_they_are,
    "blocks": blocks,
    "quality": quality,
    "settings": table,
    "shapes": shapes_table,
    "stages": stage_table,
    "wakeups": wakeup_table,
}
"""What stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
_BLOCK = re.compile(r"(<!-- (?P<name>\w+) -->\n).*?(<!-- /(?P=name) -->)", re.DOTALL)
_FILE = re.compile(r"(<!-- file: (?P<path>\S+) -->\n```\w+\n).*?(```\n)", re.DOTALL)


def rendered(page: str) -> str:
    """The text of a page with its generated parts as they are now."""
    page = _BLOCK.sub(lambda match: f"{match[1]}{_BLOCKS[match['name']]()}\n{match[3]}", page)
    return _FILE.sub(lambda match: f"{match[1]}{_read(match['path'])}{match[3]}", page)


_COMPOSE_LIST = re.compile(r"(  # settings: (?P<side>\w+)\n).*?(  # /settings\n)", re.DOTALL)
_SIDES = {"common": CommonSettings, "gateway": GatewaySettings, "worker": WorkerSettings}
SET_BY_COMPOSE = {
    "broker",
    "secret",
    "host",
    "port",
    "keys_file",
    "data_dir",
    "health_port",
}
"""Settings that docker-compose.yml or the images set."""


def composed(compose: str) -> str:
    """docker-compose.yml with its lists of settings as they are now."""
    return _COMPOSE_LIST.sub(
        lambda match: f"{match[1]}{_passed_on(match['side'])}{match[3]}", compose
    )


def _passed_on(side: str) -> str:
    common = CommonSettings.model_fields if side != "common" else {}
    own = [name for name in _SIDES[side].model_fields if name not in common]
    return "".join(f"  {variable(name)}:\n" for name in own if name not in SET_BY_COMPOSE)


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


if __name__ == "__main__":
    for path in PAGES.rglob("*.md"):
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
    COMPOSE.write_text(composed(COMPOSE.read_text(encoding="utf-8")), encoding="utf-8")

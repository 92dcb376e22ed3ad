"""The table of the steps of published shapes, from the figures of ``python -m bench.shapes``."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.options import RESULTS
from docs.site.scaling import markdown_table

_NONE = "No figures have been published yet."


def shapes_table(path: Path = RESULTS / "shapes.json") -> str:
    """A row for each step; a sentence if there are no results."""
    if not path.exists():
        return _NONE
    found = json.loads(path.read_text())
    headings = ("Shape", "Weights", "Step", "Time", "Share of the limit", "GFLOP/s")
    return markdown_table(headings, _rows(found))


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in found["rows"]:
        shape, num_new_tokens = row["shape"], row["num_new_tokens"]
        is_decode = num_new_tokens == 1
        yield (
            f"{shape}, {found['layers'][shape]} layers",
            row["weights"],
            f"Decode, {row['num_seqs']} at a time" if is_decode else f"Prompt of {num_new_tokens}",
            f"{row['step_ms']:.1f} ms",
            f"{row['of_limit']:.2f}" if is_decode else "",
            "" if is_decode else f"{row['gflops']:.0f}",
        )

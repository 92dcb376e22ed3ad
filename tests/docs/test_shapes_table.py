"""The table of the steps of published shapes."""

import json
from pathlib import Path

from docs.site.shapes import shapes_table

ROW = {"shape": "Llama-3.2-1B", "weights": "q8_0", "num_seqs": 8, "parts": {}}
DECODE = ROW | {"num_new_tokens": 1, "step_ms": 31.25, "of_limit": 0.874, "gflops": 0.0}
PROMPT = ROW | {"num_seqs": 1, "num_new_tokens": 512, "step_ms": 900.0}
PROMPT |= {"of_limit": 0.0, "gflops": 140.4}


def test_a_step_has_its_share_of_the_limit_and_a_prompt_its_rate(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"layers": {"Llama-3.2-1B": 16}, "rows": [DECODE, PROMPT]}))

    decode, prompt = shapes_table(path).splitlines()[2:]

    assert decode == "| Llama-3.2-1B, 16 layers | q8_0 | Decode, 8 at a time | 31.2 ms | 0.87 |  |"
    assert prompt == "| Llama-3.2-1B, 16 layers | q8_0 | Prompt of 512 | 900.0 ms |  | 140 |"


def test_without_results_the_page_says_that_there_are_none(tmp_path: Path) -> None:
    assert shapes_table(tmp_path / "shapes.json") == "No figures have been published yet."

import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec

from bench.recording import Recording, Token, draw

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 60_000


def recording(*times: float, killed_at_s: float) -> Recording:
    tokens = tuple(Token(at_s, f"<{k}> ") for k, at_s in enumerate(times))
    return Recording(
        question="Why?",
        killed_at_s=killed_at_s,
        tokens=tokens,
        is_undisturbed_text=True,
        about={},
    )


def test_the_picture_is_that_of_the_recording() -> None:
    recorded = msgspec.json.decode((IMAGES / "kill.json").read_bytes(), type=Recording)
    picture = (IMAGES / "kill.svg").read_text(encoding="utf-8")

    assert picture == draw(recorded)
    assert len(picture) < MAX_BYTES
    assert recorded.is_undisturbed_text


def test_the_longest_gap_after_the_kill_divides_the_workers() -> None:
    # A token that was on its way when the worker died belongs to that worker.
    one = recording(0.1, 0.9, 1.0, 1.6, 1.7, killed_at_s=0.95)

    assert one.num_before == 3


def test_the_answer_is_text_and_no_markup() -> None:
    drawn = ET.fromstring(draw(recording(0.1, 0.2, 0.9, killed_at_s=0.3)))

    spans = [span.text for span in drawn.iter("{http://www.w3.org/2000/svg}tspan")]
    assert spans == ["<0> <1> ", "✕", "<2>"]

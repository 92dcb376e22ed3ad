from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from worker.text.stream import StopFinder

# A small alphabet, so that stop strings overlap themselves and each other.
TEXTS = st.text("ab🙂", max_size=40)
STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=6), max_size=4)


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The definition: read until the text ends with a stop string."""
    for end in range(len(text) + 1):
        ended = [string for string in stop if text[:end].endswith(string)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def num_to_hold(text: str, stop: Sequence[str]) -> int:
    """The length of the longest suffix of ``text`` with which a stop string may begin."""
    return max(
        (k for string in stop for k in range(len(string)) if text.endswith(string[:k])), default=0
    )


@given(pieces=st.lists(TEXTS, max_size=8), stop=STOPS)
def test_the_text_ends_before_the_first_stop_string(pieces: list[str], stop: list[str]) -> None:
    finder = StopFinder(stop)

    text = "".join(finder.push(piece) for piece in pieces) + finder.flush()

    assert (text, finder.met) == first_stop("".join(pieces), stop)


@given(pieces=st.lists(TEXTS, max_size=8), stop=STOPS)
def test_exactly_what_may_become_a_stop_string_is_held_back(
    pieces: list[str], stop: list[str]
) -> None:
    finder = StopFinder(stop)
    given_text = sent = ""

    for piece in pieces:
        given_text += piece
        sent += finder.push(piece)
        if finder.met is None:
            assert sent == given_text[: len(given_text) - num_to_hold(given_text, stop)]


@given(pieces=st.lists(TEXTS, max_size=8), stop=STOPS, num_ignored=st.integers(0, 8))
def test_stop_strings_that_end_where_the_text_may_not_do_not_count(
    pieces: list[str], stop: list[str], num_ignored: int
) -> None:
    finder = StopFinder(stop)
    text = "".join(pieces)
    num_chars = len("".join(pieces[:num_ignored]))

    sent = [finder.push(piece, may_stop=k >= num_ignored) for k, piece in enumerate(pieces)]

    ends = [
        (end, string)
        for end in range(num_chars + 1, len(text) + 1)
        for string in sorted(stop, key=len, reverse=True)
        if text[:end].endswith(string)
    ]
    end, met = ends[0] if ends else (len(text), None)
    assert finder.met == met
    assert "".join(sent) + finder.flush() == text[: end - len(met or "")]


def test_the_stop_string_that_ends_first_wins() -> None:
    finder = StopFinder(["abcd", "bc"])

    assert finder.push("xabcd") == "xa"
    assert finder.met == "bc"


def test_of_two_stop_strings_that_end_together_the_longer_wins() -> None:
    finder = StopFinder(["c", "abc"])

    assert finder.push("xabc") == "x"
    assert finder.met == "abc"


def test_nothing_follows_a_stop_string() -> None:
    finder = StopFinder(["."])
    finder.push("One. Two")

    assert finder.push(" three") == ""
    assert finder.flush() == ""

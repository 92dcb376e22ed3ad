"""What a replay found, by the kind of request."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from cli.replay.comparison import Parting
from cli.tables import Column, FittedTable
from cli.terminal import number_of
from shared.printable import printable

_MAX_SHOWN = 5
_COLUMNS = [
    Column("requests"),
    Column("drawn", is_number=True, rank=4),
    Column("compared", is_number=True, rank=3),
    Column("equal", is_number=True),
    Column("equal %", is_number=True),
    Column("median token", is_number=True, rank=1),
    Column("median character", is_number=True, rank=2),
    Column("median margin", is_number=True, rank=1),
]


class _Margin(NamedTuple):
    value: float
    is_at_least: bool


@dataclass(slots=True)
class Findings:
    """What was found about the requests of a kind, or about all requests."""

    num_equal: int = 0
    partings: list[tuple[str, Parting]] = field(default_factory=list)
    """Each with the id of its request."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """The requests that have no new answer, each with the reason."""
    incomparable: Counter[str] = field(default_factory=Counter)
    """How many requests were not sent, by the reason."""

    @property
    def num_compared(self) -> int:
        return self.num_equal + len(self.partings)

    @property
    def num_drawn(self) -> int:
        return self.num_compared + len(self.failures) + self.incomparable.total()

    @property
    def share_equal(self) -> float | None:
        """Of the compared answers; None if there are none."""
        return self.num_equal / self.num_compared if self.num_compared else None

    @property
    def median_token(self) -> int | None:
        """The median number of equal tokens of the answers that part."""
        return _median(one.token for _, one in self.partings)

    @property
    def median_char(self) -> int | None:
        """The same in characters of the part that differs."""
        return _median(one.char for _, one in self.partings)

    @property
    def median_margin(self) -> _Margin | None:
        """The median margin where the answers part, and whether it is a lower bound: a margin up to
        the median is a lower bound itself."""
        margins = sorted(
            _Margin(one.margin, one.is_at_least)
            for _, one in self.partings
            if one.margin is not None
        )
        if not margins:
            return None
        middle = margins[(len(margins) - 1) // 2].value
        return _Margin(middle, any(one.is_at_least for one in margins if one.value <= middle))

    def numbers(self) -> dict[str, Any]:
        """The numbers alone, which say nothing of requests and answers, for JSON."""
        margin = self.median_margin
        return {
            "drawn": self.num_drawn,
            "compared": self.num_compared,
            "equal": self.num_equal,
            "failed": len(self.failures),
            "median_token": self.median_token,
            "median_character": self.median_char,
            "median_margin": None if margin is None else margin.value,
            "median_margin_is_at_least": margin is not None and margin.is_at_least,
        }

    def described(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            **self.numbers(),
            "share_equal": self.share_equal,
            "not_comparable": dict(self.incomparable),
            "failures": [{"id": name, "reason": reason} for name, reason in self.failures],
            "differences": [{"id": name, **one._asdict()} for name, one in self.partings],
        }


def total(findings: Iterable[Findings]) -> Findings:
    """The findings of several kinds together."""
    whole = Findings()
    for one in findings:
        whole.num_equal += one.num_equal
        whole.partings += one.partings
        whole.failures += one.failures
        whole.incomparable += one.incomparable
    return whole


def tables(title: str, by_kind: Mapping[str, Findings]) -> RenderableType:
    """The table of a replay, and below it what was not compared and why."""
    whole = total(by_kind.values())
    rows = [_row(kind, findings) for kind, findings in sorted(by_kind.items())]
    if len(rows) > 1:
        rows.append(_row("all", whole))
    notes = [
        f"{number_of(count, 'request')} not comparable: {reason}"
        for reason, count in sorted(whole.incomparable.items())
    ]
    if whole.failures:
        notes.append(f"{number_of(len(whole.failures), 'request')} without a new answer:")
        notes += [f"  {name}: {reason}" for name, reason in whole.failures[:_MAX_SHOWN]]
        if (num_hidden := len(whole.failures) - _MAX_SHOWN) > 0:
            notes.append(f"  and {num_hidden} more, which --json names")
    return Group(FittedTable(title, _COLUMNS, rows), *(Text(printable(note)) for note in notes))


def _row(kind: str, one: Findings) -> Sequence[str]:
    share, margin = one.share_equal, one.median_margin
    is_bound = margin is not None and margin.is_at_least
    return [
        kind,
        f"{one.num_drawn:,}",
        f"{one.num_compared:,}",
        f"{one.num_equal:,}",
        "-" if share is None else f"{100 * share:.1f}",
        _shown(one.median_token),
        _shown(one.median_char),
        "-" if margin is None else f"{'>= ' if is_bound else ''}{margin.value:.3f}",
    ]


def _shown(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _median(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return median_low(known) if known else None

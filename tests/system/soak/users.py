"""Users that make visits in sequence, each of a random kind."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import httpx

from tests.system.soak.answers import Answer
from tests.system.soak.client import PATIENCE_S, Client, Refused
from tests.system.soak.questions import LONG, Question
from tests.system.soak.tally import Outcome, Tally
from tests.system.soak.visits import Visits

SHARE_STREAMED = 0.8


class Manner(NamedTuple):
    """A kind of visit."""

    weight: int
    """Percentage of the streamed visits, or of the others."""
    visit: Callable[[Visits, Question], Awaitable[Answer | Outcome]]
    question_kind: str | None = None
    """The kind of question; None: any."""


STREAMED: Mapping[str, Manner] = {
    "stream": Manner(24, Visits.read_stream),
    "stream, slow": Manner(5, Visits.read_slowly),
    "stream, stalled": Manner(1, Visits.stall, LONG),
    "stream, left": Manner(27, Visits.leave_stream),
    "stream, left at once": Manner(6, Visits.leave_before_stream),
    "stream, resumed": Manner(12, Visits.return_to_stream),
    "stream, detached": Manner(5, Visits.detach),
    "stream, deleted": Manner(6, Visits.cancel_stream),
    "stream, key twice": Manner(3, Visits.stream_with_key_twice),
    "stream, key at once": Manner(3, Visits.stream_with_key_at_once),
    "stream, deadline": Manner(8, Visits.stream_in_no_time),
}
WHOLE: Mapping[str, Manner] = {
    "whole": Manner(30, Visits.ask),
    "quick": Manner(6, Visits.tokenize),
    "whole, left": Manner(33, Visits.leave_whole),
    "whole, key twice": Manner(8, Visits.ask_with_key_twice),
    "whole, key at once": Manner(7, Visits.ask_with_key_at_once),
    "whole, key again": Manner(8, Visits.ask_again_with_key),
    "whole, deadline": Manner(8, Visits.ask_in_no_time),
}


class User:
    """Draws questions and kinds of visits from ``dice``."""

    def __init__(
        self, client: Client, expected: Mapping[Question, Answer], tally: Tally, dice: random.Random
    ) -> None:
        self._client = client
        self._visits = Visits(client, expected, dice)
        self._expected = expected
        self._tally = tally
        self._dice = dice

    async def visit(self) -> None:
        """Ask a question, and add unexpected results to the tally."""
        manners = STREAMED if self._dice.random() < SHARE_STREAMED else WHOLE
        weights = [manner.weight for manner in manners.values()]
        (kind,) = self._dice.choices([*manners], weights)
        question = self._question(manners[kind])
        try:
            async with asyncio.timeout(PATIENCE_S):
                found = await manners[kind].visit(self._visits, question)
        except TimeoutError:
            self._fail(kind, question, f"no end after {PATIENCE_S:.0f} s")
        except (Refused, httpx.HTTPError) as error:
            self._fail(kind, question, repr(error))
        else:
            if isinstance(found, Answer):
                self._tally.compare(kind, question, found, self._expected[question])
            else:
                self._tally.count(kind, found)

    def _question(self, manner: Manner) -> Question:
        wanted = manner.question_kind
        return self._dice.choice([q for q in self._expected if wanted in (None, q.kind)])

    def _fail(self, kind: str, question: Question, reason: str) -> None:
        self._tally.fail(kind, f"{question.name}, {self._client.request_id}: {reason}")

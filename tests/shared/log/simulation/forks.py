"""Forks: requests whose answers begin with tokens of other answers, from logs that may still grow.

A gateway reads the tokens as `gateway.api.routes.forks` does, and the worker that has the job of
the fork writes them first.
"""

import random
from dataclasses import replace
from typing import NamedTuple

from tests.shared.log.simulation.model import Model
from tests.shared.log.simulation.schedule import Schedule

_NUM_GENERATIONS = 3
_MAX_STEPS_BEFORE = 120


class Fork(NamedTuple):
    """A request, and what the next request has of its answer."""

    schedule: Schedule
    choice: int
    given_ids: tuple[int, ...]
    num_heard: int
    """The tokens of the choice that a client had by then."""
    num_renewals: int
    """How often the log had been recreated by then."""

    @property
    def lasting_ids(self) -> tuple[int, ...]:
        """The given tokens that the answer still has at its end. Tokens that no client has are lost
        with the node of their log, and others may be drawn in their place."""
        is_recreated = self.schedule.num_renewals > self.num_renewals
        return self.given_ids[: self.num_heard] if is_recreated else self.given_ids


class ForkedSchedule:
    """Runs a request, a fork of it and a fork of the fork, each with its own faults. A request is
    forked at any moment, and goes on. Raises `AssertionError` if a promise is broken."""

    def __init__(self, seed: int, model: Model) -> None:
        self._seed = seed
        self._dice = random.Random(seed)
        self._model = replace(model, is_kept=True)

    def run(self) -> None:
        forks: list[Fork] = []
        for generation in range(_NUM_GENERATIONS):
            given_ids = forks[-1].given_ids if forks else ()
            model = replace(self._model, generation=generation, given_ids=given_ids)
            forks.append(self._begun(Schedule(_NUM_GENERATIONS * self._seed + generation, model)))
        for fork in forks:
            fork.schedule.run()
            assert fork.schedule.has_said(fork.choice, fork.lasting_ids), (
                "the fork begins with tokens that the answer does not have"
            )

    def _begun(self, schedule: Schedule) -> Fork:
        schedule.advance(self._dice.randint(0, _MAX_STEPS_BEFORE))
        choice = self._dice.randrange(self._model.num_choices)
        num_heard = schedule.num_heard(choice)
        token_ids = schedule.read_tokens(choice, self._model.origin_reader_class)
        given_ids = token_ids[: self._dice.randint(0, len(token_ids))]
        return Fork(schedule, choice, given_ids, num_heard, schedule.num_renewals)

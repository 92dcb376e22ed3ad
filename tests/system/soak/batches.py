"""Batches that run in sequence beside the users."""

import asyncio
import itertools
import json
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cli.batch.pipeline import run_batch
from shared.bus.rabbit import RabbitBus
from shared.errors import WarrenError
from tests.support.workers.batch_files import read_lines, write_lines
from tests.system.soak.answers import Answer, answer_of
from tests.system.soak.questions import Question
from tests.system.soak.tally import Tally

KIND = "batch"
_NUM_LINES = 24
_WINDOW = 6
_SHARE_INTERRUPTED = 0.25
_MAX_UNINTERRUPTED_S = 1.0


class Batches:
    """Runs batches with the permissions of a publisher, and keeps their files in ``folder``."""

    def __init__(
        self,
        broker_url: str,
        folder: Path,
        expected: Mapping[Question, Answer],
        tally: Tally,
        dice: random.Random,
    ) -> None:
        self._broker_url = broker_url
        self._folder = folder
        self._expected = expected
        self._tally = tally
        self._dice = dice

    async def run(self, is_over: asyncio.Event) -> None:
        """Return when the last batch has ended."""
        async with RabbitBus(self._broker_url) as bus:
            for number in itertools.count():
                if is_over.is_set():
                    return
                try:
                    await self._answer(bus, number)
                except WarrenError as error:
                    self._tally.fail(KIND, f"batch {number}: {error!r}")

    async def _answer(self, bus: RabbitBus, number: int) -> None:
        questions = self._dice.choices(list(self._expected), k=_NUM_LINES)
        lines = [
            {"custom_id": f"{number}-{k}", "method": "POST", "url": one.path, "body": one.body}
            for k, one in enumerate(questions)
        ]
        source, output = (self._folder / f"batch{number}.{suffix}" for suffix in ("in", "out"))
        write_lines(source, *lines)
        if self._dice.random() < _SHARE_INTERRUPTED:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._dice.uniform(0, _MAX_UNINTERRUPTED_S)):
                    await run_batch(source, output, bus, window=_WINDOW)
        if not output.exists():
            await run_batch(source, output, bus, window=_WINDOW)
        for question, line in zip(questions, read_lines(output), strict=True):
            response = line["response"]
            if response["status_code"] == 200:
                answer = answer_of(response["body"])
                self._tally.compare(KIND, question, answer, self._expected[question])
            else:
                self._tally.fail(KIND, f"{question.name}: {json.dumps(response)}")
        source.unlink()
        output.unlink()

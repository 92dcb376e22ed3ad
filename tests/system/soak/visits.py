"""What a user does with a question, from ordinary to rude."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from shared.errors import Cancelled, DeadlineExceeded, StreamExpired, TakenOver
from tests.system.soak.answers import Answer
from tests.system.soak.client import Client, Reading, Refused
from tests.system.soak.questions import SEVERAL, Question
from tests.system.soak.tally import Outcome

_MAX_EVENTS = 30
"""The maximum number of events that are read before a client leaves a stream."""
_MAX_WHOLE_S = 0.3
"""The maximum time before a client leaves a whole response."""
_MAX_DEADLINE_S = 0.05
_AWAY_S = 3.0
"""The maximum time before a client returns."""
_STALLED_S = 10.0
_SHARE_STALLED_LEFT = 0.3

AskedFor: TypeAlias = type[Cancelled | DeadlineExceeded | StreamExpired | TakenOver]


class Visits:
    """Each visit asks a question. It returns the answer if it was read to its end, and otherwise
    the result. Raises `Refused` for an unexpected error."""

    def __init__(
        self, client: Client, expected: Mapping[Question, Answer], dice: random.Random
    ) -> None:
        self._client = client
        self._expected = expected
        self._dice = dice

    async def read_stream(self, question: Question) -> Answer:
        return await self._streamed(question)

    async def read_slowly(self, question: Question) -> Answer:
        """Read with a pause after each event, and one long pause."""
        reading = Reading()
        async with self._client.stream(question, reading) as stream:
            await stream.read(self._dice.randint(1, _MAX_EVENTS))
            await asyncio.sleep(self._dice.uniform(0, _AWAY_S))
            await stream.read(pause_s=self._dice.uniform(0, 0.02))
        return reading.answer

    async def stall(self, question: Question) -> Answer | Outcome:
        """Stop reading until the gateway has to wait, then continue or leave."""
        reading = Reading()
        async with self._client.stream(question, reading, is_narrow=True) as stream:
            await stream.read(self._dice.randint(0, _MAX_EVENTS))
            await asyncio.sleep(self._dice.uniform(0, _STALLED_S))
            if self._dice.random() < _SHARE_STALLED_LEFT:
                return "left"
            await stream.read()
        return reading.answer

    async def leave_stream(self, question: Question) -> Outcome:
        reading = Reading()
        has_ids = self._dice.random() < 0.3
        async with self._client.stream(question, reading, has_ids=has_ids) as stream:
            await stream.read(self._dice.randint(0, _MAX_EVENTS))
        return "left"

    async def leave_before_stream(self, question: Question) -> Outcome:
        """Leave, possibly before the response headers."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._dice.uniform(0, 0.1)):
                await self._streamed(question)
        return "left"

    async def return_to_stream(self, question: Question) -> Answer:
        """Leave repeatedly, and resume at any gateway."""
        reading = Reading()
        async with self._client.stream(question, reading, has_ids=True) as stream:
            await stream.read(self._dice.randint(1, _MAX_EVENTS))
        for num_events in (*self._dice.choices(range(1, 20), k=self._dice.randint(0, 3)), None):
            await asyncio.sleep(self._dice.choice((0, 0, self._dice.uniform(0, _AWAY_S))))
            await self._resume(reading, num_events)
        return reading.answer

    async def detach(self, question: Question) -> Answer:
        """Leave a detached stream and read it later, from the start or from the last event."""
        reading = Reading()
        async with self._client.stream(question, reading, detach=True) as stream:
            await stream.read(self._dice.randint(0, 5))
        await asyncio.sleep(self._dice.uniform(0, _AWAY_S))
        if self._dice.random() < 0.5:
            reading = Reading(reading.stream_id)
        await self._resume(reading)
        return reading.answer

    async def cancel_stream(self, question: Question) -> Answer | Outcome:
        """Cancel a stream at any gateway while it is being read."""
        reading = Reading()
        async with self._client.stream(question, reading, has_ids=True) as stream:
            await stream.read(self._dice.randint(1, 4))
            deleting = asyncio.create_task(self._delete(reading.stream_id))
            try:
                await stream.read()
            except Refused as error:
                _expect(error, Cancelled)
            finally:
                await deleting
        if await self._client.is_kept(reading.stream_id):
            raise Refused(200, "kept", f"{reading.stream_id} was deleted, and can be resumed")
        return reading.answer if reading.is_ended else "cancelled"

    async def stream_with_key_twice(self, question: Question) -> Answer:
        key = self._new_key()
        first = await self._streamed(question, key)
        return self._equal(question, first, await self._streamed(question, key))

    async def ask_with_key_twice(self, question: Question) -> Answer:
        key = self._new_key()
        first = await self._client.ask(question, key)
        return self._equal(question, first, await self._client.ask(question, key))

    async def stream_with_key_at_once(self, question: Question) -> Answer:
        """Stream twice at once. A log has one reader, so one of the two may be cut off and
        retries."""
        return await self._at_once(question, self._streamed)

    async def ask_with_key_at_once(self, question: Question) -> Answer:
        return await self._at_once(question, self._client.ask)

    async def ask_again_with_key(self, question: Question) -> Answer:
        """Leave early and send the same request again. The first may reach its gateway after the
        second, and cut it off."""
        key = self._new_key()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._dice.uniform(0, _MAX_WHOLE_S)):
                await self._client.ask(question, key)
        try:
            return await self._client.ask(question, key)
        except Refused as error:
            _expect(error, TakenOver)
            return await self._client.ask(question, key)

    async def stream_in_no_time(self, question: Question) -> Answer | Outcome:
        """Ask with a deadline that few answers can meet."""
        try:
            return await self._streamed(question, timeout=self._new_deadline())
        except Refused as error:
            _expect(error, DeadlineExceeded)
            return "deadline"

    async def ask_in_no_time(self, question: Question) -> Answer | Outcome:
        try:
            return await self._client.ask(question, timeout=self._new_deadline())
        except Refused as error:
            _expect(error, DeadlineExceeded)
            return "deadline"

    async def ask(self, question: Question) -> Answer:
        return await self._client.ask(question)

    async def leave_whole(self, question: Question) -> Outcome:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._dice.uniform(0, _MAX_WHOLE_S)):
                await self._client.ask(question)
        return "left"

    async def tokenize(self, question: Question) -> Answer:
        """Count the tokens of the prompts, which the usage also reports."""
        body, num_tokens = question.body, 0
        prompts = body["prompt"] if question.kind == SEVERAL else [body.get("prompt")]
        for prompt in prompts:
            if isinstance(prompt, list):
                told = await self._client.post("/detokenize", {"tokens": prompt})
                num_tokens += len(prompt) if told["prompt"] else 0
            else:
                asked = {"prompt": prompt}
                if prompt is None:
                    asked = {name: body[name] for name in ("messages", "tools") if name in body}
                told = await self._client.post("/tokenize", asked)
                num_tokens += told["count"]
        return replace(self._expected[question], num_prompt_tokens=num_tokens)

    async def _streamed(self, question: Question, key: str | None = None, **more: Any) -> Answer:
        reading = Reading()
        async with self._client.stream(question, reading, key=key, **more) as stream:
            await stream.read()
        return reading.answer

    async def _resume(self, reading: Reading, num_events: int | None = None) -> None:
        async with self._client.resume(reading) as stream:
            await stream.read(num_events)

    async def _delete(self, stream_id: str) -> None:
        try:
            await self._client.delete(stream_id)
        except Refused as error:  # the stream may have ended in the meantime
            _expect(error, StreamExpired)

    async def _at_once(
        self, question: Question, ask: Callable[[Question, str], Awaitable[Answer]]
    ) -> Answer:
        key = self._new_key()
        first, second = await asyncio.gather(
            ask(question, key), ask(question, key), return_exceptions=True
        )
        answers = []
        for found in (first, second):
            if isinstance(found, BaseException):
                _expect(found, TakenOver)
                answers.append(await ask(question, key))
            else:
                answers.append(found)
        return self._equal(question, *answers)

    def _equal(self, question: Question, first: Answer, second: Answer) -> Answer:
        """The second answer if the first is right; otherwise the first."""
        return second if first == self._expected[question] else first

    def _new_key(self) -> str:
        return self._dice.randbytes(16).hex()

    def _new_deadline(self) -> float:
        return self._dice.uniform(0.001, _MAX_DEADLINE_S)


def _expect(
    error: BaseException, asked_for: type[Cancelled | DeadlineExceeded | StreamExpired | TakenOver]
) -> None:
    """Raise ``error`` unless the client asked for it."""
    if not isinstance(error, Refused) or error.code != asked_for.code:
        raise error

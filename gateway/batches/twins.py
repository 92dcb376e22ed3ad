"""Equal lines of a batch: the first is computed, and the others repeat its answer."""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from gateway.api.render import whole_answer
from gateway.api.render.answer_builder import AnswerBuilder
from gateway.api.render.formats import Rendering
from gateway.batches.lines import UNREADABLE
from gateway.log.cursor import LogEvent
from shared.messages import Finished, GenerationJob, Started, TokenDelta

_DIGEST_BYTES = 16


class _DrawFields(msgspec.Struct, frozen=True):
    """The fields of a request that decide whether its answer is determined, of all endpoints."""

    temperature: Any = None
    top_k: Any = None
    seed: Any = None


_DRAW_DECODER = msgspec.json.Decoder(_DrawFields)


def twin_key(body: bytes | msgspec.Raw) -> bytes:
    """What a request has in common with equal requests of its batch; empty if its answer is not
    determined. The spaces between the fields do not count, and their order does: the tools of a
    prompt are rendered in it."""
    with suppress(*UNREADABLE):
        draw = _DRAW_DECODER.decode(body)
        if draw.temperature == 0 or draw.top_k == 1 or draw.seed is not None:
            same = msgspec.json.encode(msgspec.json.decode(body))
            return hashlib.blake2b(same, digest_size=_DIGEST_BYTES).digest()
    return b""


class ComputedAnswer(NamedTuple):
    """The answer to the first of several equal lines."""

    job: GenerationJob
    rendering: Rendering
    events: Sequence[LogEvent]

    @property
    def num_prompt_tokens(self) -> int:
        started = (event for event in self.events if isinstance(event, Started))
        return sum(next(started).num_prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        with_tokens = (one for one in self.events if isinstance(one, TokenDelta | Finished))
        return sum(len(event.token_ids) for event in with_tokens)

    def rendered(self, request_id: str) -> object:
        """The answer to an equal line with this id."""
        builder = AnswerBuilder(msgspec.structs.replace(self.rendering, request_id=request_id))
        for event in self.events:
            builder.read(event)
        return whole_answer(builder)


class TwinGroup:
    """Equal lines, of which one is being computed."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._answer: asyncio.Future[ComputedAnswer | None] = (
            asyncio.get_running_loop().create_future()
        )

    def give(self, answer: ComputedAnswer | None) -> None:
        """Give the others the answer; None if they have to be computed, too. Only the first call
        has an effect."""
        if not self._answer.done():
            self._answer.set_result(answer)

    async def wait(self) -> ComputedAnswer | None:
        """The answer to the line that is computed; None if there is none to repeat."""
        return await asyncio.shield(self._answer)


class TwinRole(NamedTuple):
    """The part of a line in its group."""

    group: TwinGroup
    is_first: bool


class Twins:
    """Groups consecutive equal lines."""

    def __init__(self) -> None:
        self._current: TwinGroup | None = None

    def role(self, key: bytes) -> TwinRole | None:
        """The part of the next line; None if it may have no equals."""
        if not key:
            return None
        if self._current is not None and self._current.key == key:
            return TwinRole(self._current, is_first=False)
        self._current = TwinGroup(key)
        return TwinRole(self._current, is_first=True)

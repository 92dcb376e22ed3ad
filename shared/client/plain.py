"""Jobs over RabbitMQ for programs without an event loop: `Client`."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from threading import Thread
from typing import Any, Self, TypeVar, Unpack

from shared.client.client import AnswerEvent, AsyncClient, AsyncGenerator, ChatOptions, Options
from shared.client.prompts import Chats, PromptLike
from shared.messages import ChatPrompt, Completed, Failed, SamplingParams
from shared.settings import DEFAULT_MODEL

_Item = TypeVar("_Item")
_DEFAULT = SamplingParams()
_END = object()


class Client:
    """`AsyncClient` for programs without an event loop, with the same methods. ``with`` connects
    and disconnects it.

    It may be used by several threads. Its connection has a thread of its own, so that it lives
    however long the program does something else.
    """

    def __init__(self, url: str, model: str = DEFAULT_MODEL) -> None:
        """See `AsyncClient`."""
        self._client = AsyncClient(url, model)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="warren-client", daemon=True)

    def __enter__(self) -> Self:
        """Raises `StartupError` if the broker refuses the login, and `BusUnavailable` if it cannot
        be reached."""
        self._thread.start()
        try:
            self._run(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._run(self._client.__aexit__(*error))
        finally:
            self._stop()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[Options],
    ) -> list[Completed]:
        """See `AsyncClient.generate`."""
        return self._run(self._client.generate(prompts, sampling, **options))

    def chat(
        self,
        conversations: Chats,
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[ChatOptions],
    ) -> list[Completed]:
        """See `AsyncClient.chat`."""
        return self._run(self._client.chat(conversations, sampling, **options))

    def batch(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[Options],
    ) -> Iterator[tuple[int, Completed | Failed]]:
        """See `AsyncClient.batch`."""
        return self._iterate(self._client.batch(prompts, sampling, **options))

    def batch_chat(
        self,
        conversations: Chats,
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[ChatOptions],
    ) -> Iterator[tuple[int, Completed | Failed]]:
        """See `AsyncClient.batch_chat`."""
        return self._iterate(self._client.batch_chat(conversations, sampling, **options))

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[Options],
    ) -> Iterator[AnswerEvent]:
        """See `AsyncClient.stream`."""
        return self._iterate(self._client.stream(prompt, sampling, **options))

    def stream_chat(
        self,
        conversation: Chats,
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[ChatOptions],
    ) -> Iterator[AnswerEvent]:
        """See `AsyncClient.stream_chat`."""
        return self._iterate(self._client.stream_chat(conversation, sampling, **options))

    def submit(
        self,
        prompt: PromptLike | ChatPrompt,
        sampling: SamplingParams = _DEFAULT,
        **options: Unpack[Options],
    ) -> str:
        """See `AsyncClient.submit`."""
        return self._run(self._client.submit(prompt, sampling, **options))

    def resume(
        self, request_id: str, *, num_choices: int = 1, num_seen: int = 0
    ) -> Iterator[AnswerEvent]:
        """See `AsyncClient.resume`."""
        events = self._client.resume(request_id, num_choices=num_choices, num_seen=num_seen)
        return self._iterate(events)

    def cancel(self, request_id: str, *, num_choices: int = 1) -> None:
        """See `AsyncClient.cancel`."""
        self._run(self._client.cancel(request_id, num_choices=num_choices))

    def _run(self, work: Coroutine[Any, Any, _Item]) -> _Item:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()  # the program was interrupted
            raise

    def _iterate(self, items: AsyncGenerator[_Item]) -> Iterator[_Item]:
        try:
            while (item := self._run(_next(items))) is not _END:
                yield item  # type: ignore[misc] # mypy does not know that `_END` is the only other
        finally:
            self._run(items.aclose())

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(items: AsyncGenerator[_Item]) -> _Item | object:
    return await anext(items, _END)

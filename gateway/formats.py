"""OpenAI's two shapes of an answer, whole and in chunks."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from shared import messages
from shared.messages import Finished, FinishReason


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class Answer(Struct, frozen=True, kw_only=True):
    """A whole answer, or one chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Any]
    usage: Usage | UnsetType | None = UNSET


class Delta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class _Choice(Struct, frozen=True, kw_only=True):
    index: int
    logprobs: None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | UnsetType = UNSET
    """The stop string that was met, as in vLLM."""


class ChatChunkChoice(_Choice, frozen=True, kw_only=True):
    delta: Delta


class ChatChoice(_Choice, frozen=True, kw_only=True):
    message: ChatMessage


class TextChoice(_Choice, frozen=True, kw_only=True):
    text: str


Choice: TypeAlias = ChatChunkChoice | ChatChoice | TextChoice


class AnswerFormat(Protocol):
    """How one endpoint words an answer."""

    @property
    def id_kind(self) -> str:
        """What the answer's id begins with."""
        ...

    @property
    def answer_object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    def opening(self, index: int) -> Choice | None:
        """What a choice's stream begins with, before there is text."""
        ...

    def piece(self, index: int, text: str) -> Choice: ...

    def ending(self, finished: Finished) -> Choice: ...

    def whole(self, index: int, text: str, end: Finished | messages.Choice) -> Choice: ...


class ChatFormat:
    id_kind = "chatcmpl"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> Choice | None:
        return ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))

    def piece(self, index: int, text: str) -> Choice:
        return ChatChunkChoice(index=index, delta=Delta(content=text))

    def ending(self, finished: Finished) -> Choice:
        return ChatChunkChoice(
            index=finished.choice,
            delta=Delta(),
            finish_reason=finished.finish_reason,
            stop_reason=finished.stop_reason or UNSET,
        )

    def whole(self, index: int, text: str, end: Finished | messages.Choice) -> Choice:
        return ChatChoice(
            index=index,
            message=ChatMessage(content=text),
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason or UNSET,
        )


class CompletionFormat:
    id_kind = "cmpl"
    answer_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> Choice | None:
        return None

    def piece(self, index: int, text: str) -> Choice:
        return TextChoice(index=index, text=text)

    def ending(self, finished: Finished) -> Choice:
        return self.whole(finished.choice, "", finished)

    def whole(self, index: int, text: str, end: Finished | messages.Choice) -> Choice:
        return TextChoice(
            index=index,
            text=text,
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason or UNSET,
        )

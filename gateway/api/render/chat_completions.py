"""Renders the answers of POST /v1/chat/completions."""

from collections.abc import Sequence

from msgspec import UNSET

from gateway.api.render.formats import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionMessage,
    ChunkChoice,
    CustomTool,
    Delta,
    Function,
    MessageToolCall,
    ToolCallDelta,
    call_id,
    finish_reason,
    or_unset,
)
from gateway.api.render.gathering import Call, GatheredChoice, Gathering
from gateway.api.render.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs, shown_logprobs
from gateway.api.rendering import Rendering
from gateway.text.pieces import CallArguments, CallInput, CallStart, Content, Piece, Reasoning
from shared.messages import Finished, PromptScores, Started, TokenDelta, TokenLogprobs


class ChatChunks:
    """The words of a stream."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering

    def opening(self, event: Started) -> list[ChunkChoice]:
        delta = Delta(role="assistant", content="")
        return [ChatChunkChoice(index=k, delta=delta) for k in range(self._rendering.total_drawn)]

    def scores(self, event: PromptScores) -> list[ChunkChoice]:
        return []

    def tokens(self, event: TokenDelta | Finished, pieces: Sequence[Piece]) -> list[ChunkChoice]:
        deltas = [self._delta(event.choice, piece) for piece in pieces]
        logprobs = _logprobs(self._rendering, shown_logprobs(self._rendering, event))
        if logprobs is not None and not deltas:
            deltas = [Delta(content="")]
        return [
            ChatChunkChoice(index=event.choice, delta=delta, logprobs=None if k else logprobs)
            for k, delta in enumerate(deltas)
        ]

    def plain(self, choice: int, text: str) -> ChunkChoice:
        return ChatChunkChoice(index=choice, delta=Delta(content=text))

    def ending(self, event: Finished, *, has_called: bool) -> ChunkChoice:
        return ChatChunkChoice(
            index=event.choice,
            delta=Delta(),
            finish_reason=finish_reason(
                self._rendering, event.finish_reason, has_called=has_called
            ),
            stop_reason=or_unset(event.stop_reason),
        )

    def _delta(self, choice: int, piece: Piece) -> Delta:
        match piece:
            case Content(text):
                return Delta(content=text)
            case Reasoning(text):
                return Delta(reasoning_content=text)
            case CallStart(_, name) if self._rendering.has_functions:
                return Delta(function_call=Function(name=name, arguments=""))
            case CallArguments(_, text) if self._rendering.has_functions:
                return Delta(function_call=Function(arguments=text))
            case CallStart(index, name, is_custom=True):
                call = ToolCallDelta(
                    index=index,
                    id=call_id(self._rendering, choice, index, name),
                    type="custom",
                    custom=CustomTool(name=name, input=""),
                )
            case CallInput(index, text):
                call = ToolCallDelta(index=index, custom=CustomTool(input=text))
            case CallStart(index, name):
                call = ToolCallDelta(
                    index=index,
                    id=call_id(self._rendering, choice, index, name),
                    type="function",
                    function=Function(name=name, arguments=""),
                )
            case CallArguments(index, text):
                call = ToolCallDelta(index=index, function=Function(arguments=text))
        return Delta(tool_calls=(call,))


def whole_chat(gathering: Gathering) -> ChatCompletion:
    """The answer to a request that does not stream."""
    rendering = gathering.rendering
    scores = gathering.prompt_scores[0]
    return ChatCompletion(
        id=rendering.request_id,
        created=rendering.created,
        model=rendering.model,
        choices=[_choice(rendering, k, choice) for k, choice in enumerate(gathering.choices)],
        usage=gathering.usage,
        service_tier=rendering.service_tier or UNSET,
        system_fingerprint=gathering.system_fingerprint or UNSET,
        prompt_logprobs=UNSET if rendering.prompt_logprobs is None else prompt_logprobs(scores),
    )


def _choice(rendering: Rendering, index: int, choice: GatheredChoice) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=_message(rendering, choice),
        logprobs=_logprobs(rendering, choice.logprobs),
        finish_reason=finish_reason(
            rendering, choice.finish_reason, has_called=choice.reader.has_called
        ),
        stop_reason=or_unset(choice.stop_reason),
    )


def _message(rendering: Rendering, choice: GatheredChoice) -> ChatCompletionMessage:
    if rendering.has_functions and choice.calls:
        call = choice.calls[0]
        return ChatCompletionMessage(
            content=choice.content or None,
            reasoning_content=choice.reasoning or UNSET,
            function_call=Function(name=call.name, arguments=call.arguments),
        )
    calls = [
        _call(call_id(rendering, choice.index, index, call.name), call)
        for index, call in enumerate(choice.calls)
    ]
    return ChatCompletionMessage(
        content=choice.content or (None if calls else ""),
        reasoning_content=choice.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _call(call_id: str, call: Call) -> MessageToolCall:
    if call.is_custom:
        custom = CustomTool(name=call.name, input=call.arguments)
        return MessageToolCall(id=call_id, type="custom", custom=custom)
    function = Function(name=call.name, arguments=call.arguments)
    return MessageToolCall(id=call_id, function=function)


def _logprobs(rendering: Rendering, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
    if rendering.logprobs is None:
        return None
    return chat_logprobs(tokens, as_ids=rendering.tokens_as_ids) if tokens else None

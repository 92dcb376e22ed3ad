"""Renders the answers of POST /v1/chat/completions and /v1/completions, whole and as streams with a
chunk for each piece of each choice."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from msgspec import UNSET

from gateway.api.render.answer_builder import AnswerBuilder, AnswerChoice, Call
from gateway.api.render.choice_reader import ChoiceReader, ShownLogprobs
from gateway.api.render.formats import (
    DONE,
    ENCODER,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionMessage,
    Chunk,
    ChunkChoice,
    Completion,
    CustomTool,
    Delta,
    Function,
    MessageToolCall,
    Rendering,
    TextChoice,
    TokenCounts,
    ToolCallDelta,
    Usage,
    call_id,
    error_of,
    error_payload,
    finish_reason,
    obfuscation,
    or_unset,
    system_fingerprint,
)
from gateway.api.render.logprobs import (
    ChatLogprobs,
    TextLogprobs,
    TextScale,
    chat_logprobs,
    joined,
    prompt_logprobs,
)
from gateway.log.framing import Payload
from gateway.text.pieces import CallArguments, CallInput, CallStart, Content, Piece, Reasoning
from shared.errors import WarrenError
from shared.messages import Failed, Finished, PromptScores, Started, TokenDelta, TokenLogprobs

_MARK = "\0"
_MARK_JSON = ENCODER.encode(_MARK)


class ChatChunks:
    """The chunks of a chat's stream."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering

    def opening(self, event: Started) -> list[ChunkChoice]:
        """The first chunks of the choices, without text."""
        delta = Delta(role="assistant", content="")
        return [ChatChunkChoice(index=k, delta=delta) for k in range(self._rendering.total_drawn)]

    def scores(self, event: PromptScores) -> list[ChunkChoice]:
        return []

    def tokens(
        self,
        event: TokenDelta | Finished,
        pieces: Sequence[Piece],
        shown: Sequence[TokenLogprobs],
    ) -> list[ChunkChoice]:
        """New tokens of a choice, the pieces of their text, and the logprobs to show."""
        deltas = [self._delta(event.choice, piece) for piece in pieces]
        logprobs = _chat_logprobs(self._rendering, shown)
        if logprobs is not None and not deltas:
            deltas = [Delta(content="")]
        return [
            ChatChunkChoice(index=event.choice, delta=delta, logprobs=None if k else logprobs)
            for k, delta in enumerate(deltas)
        ]

    def plain(self, choice: int, text: str) -> ChunkChoice:
        """New text of a choice whose chunks contain nothing else."""
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


class TextChunks:
    """The chunks of a completion's stream. If the prompt is echoed, it is each choice's first
    chunk."""

    chunk_object = "text_completion"

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._scales: defaultdict[int, TextScale] = defaultdict(
            partial(TextScale, as_ids=rendering.tokens_as_ids)
        )
        self._prompt_texts: tuple[str, ...] = ()
        self._num_prompt_tokens: tuple[int, ...] = ()
        self._scored_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._scores: defaultdict[int, list[TokenLogprobs | None]] = defaultdict(list)

    def opening(self, event: Started) -> list[ChunkChoice]:
        self._prompt_texts = event.prompt_texts
        self._num_prompt_tokens = event.num_prompt_tokens
        if not self._rendering.echo or self._rendering.logprobs is not None:
            return []
        return [self.plain(k, self._prompt(k)) for k in range(self._rendering.total_drawn)]

    def scores(self, event: PromptScores) -> list[ChunkChoice]:
        """The echo has its logprobs, once these are all there."""
        prompt = event.prompt
        self._scored_ids[prompt] += event.token_ids
        self._scores[prompt] += event.logprobs
        is_complete = len(self._scores[prompt]) == self._num_prompt_tokens[prompt]
        if not is_complete or not self._rendering.echo or self._rendering.logprobs is None:
            return []
        first = prompt * self._rendering.num_drawn
        return [self._echo(k) for k in range(first, first + self._rendering.num_drawn)]

    def tokens(
        self,
        event: TokenDelta | Finished,
        pieces: Sequence[Piece],
        shown: Sequence[TokenLogprobs],
    ) -> list[ChunkChoice]:
        if not event.text and not shown:
            return []
        logprobs = self._scales[event.choice].read(shown) if shown else None
        return [TextChoice(index=event.choice, text=event.text, logprobs=logprobs)]

    def plain(self, choice: int, text: str) -> ChunkChoice:
        return TextChoice(index=choice, text=text)

    def ending(self, event: Finished, *, has_called: bool) -> ChunkChoice:
        return TextChoice(
            index=event.choice,
            text="",
            finish_reason=event.finish_reason,
            stop_reason=or_unset(event.stop_reason),
        )

    def _prompt(self, choice: int) -> str:
        return self._prompt_texts[choice // self._rendering.num_drawn]

    def _echo(self, choice: int) -> ChunkChoice:
        prompt, text = choice // self._rendering.num_drawn, self._prompt(choice)
        scale = self._scales[choice]
        logprobs = scale.echo(text, self._scored_ids[prompt], self._scores[prompt])
        return TextChoice(index=choice, text=text, logprobs=logprobs)


class ChunkEncoder:
    """Renders the stream of a request, and counts its tokens."""

    def __init__(self, rendering: Rendering, words: ChatChunks | TextChunks) -> None:
        self._rendering = rendering
        self._words = words
        num_read = 0 if rendering.is_plain else rendering.total_drawn
        self._readers = [ChoiceReader(rendering) for _ in range(num_read)]
        num_shown = 0 if rendering.logprobs is None else rendering.total_drawn
        self._shown = [ShownLogprobs(rendering) for _ in range(num_shown)]
        self._counts = TokenCounts(rendering.num_drawn)
        # Completions have no such field.
        self._tier = rendering.service_tier if rendering.endpoint == "chat" else None
        self._has_begun = False
        self._is_plain = (
            rendering.is_plain
            and rendering.logprobs is None
            and not rendering.continuous_usage
            and not rendering.is_obfuscated
        )
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    @property
    def usage(self) -> Usage:
        self._counts.num_reasoning_tokens = sum(
            reader.num_reasoning_tokens for reader in self._readers
        )
        return self._counts.usage

    @property
    def _fingerprint(self) -> str | None:
        return system_fingerprint(self._rendering, self._counts)

    def on_start(self, event: Started) -> list[Payload]:
        self._counts.on_start(event)
        is_first, self._has_begun = not self._has_begun, True
        return self._chunks(self._words.opening(event)) if is_first else []

    def on_scores(self, event: PromptScores) -> list[Payload]:
        return self._chunks(self._words.scores(event))

    def on_tokens(self, event: TokenDelta) -> list[Payload]:
        self._counts.on_tokens(event)
        return self._tokens(event)

    def on_finish(self, event: Finished) -> list[Payload]:
        self._counts.on_finish(event)
        tokens = self._tokens(event)
        has_called = bool(self._readers) and self._readers[event.choice].has_called
        ending = self._words.ending(event, has_called=has_called)
        return [*tokens, self._chunk(ending, self._fingerprint)]

    def on_failure(self, event: Failed) -> list[Payload]:
        return self.fail(error_of(event))

    def end(self, receipt: str | None = None) -> list[Payload]:
        if not self._rendering.include_usage and receipt is None:
            return [DONE]
        return [self._encode((), self.usage, self._fingerprint, receipt), DONE]

    def fail(self, error: WarrenError) -> list[Payload]:
        return [error_payload(error)]

    def _tokens(self, event: TokenDelta | Finished) -> list[Payload]:
        if self._is_plain:
            # The worker holds back incomplete characters and possible stop strings.
            return [self._framed(event.choice, event.text)] if event.text else []
        if self._readers:
            reader = self._readers[event.choice]
            pieces = reader.read(event.text, len(event.token_ids), event.num_chars)
            if isinstance(event, Finished):
                pieces += reader.end()
        else:
            pieces = [Content(event.text)] if event.text else []
        shown = self._shown[event.choice].read(event) if self._shown else ()
        return self._chunks(self._words.tokens(event, pieces, shown))

    def _framed(self, choice: int, text: str) -> Payload:
        before, after = self._frames.get(choice) or self._new_frame(choice)
        return Payload(b"%b%b%b" % (before, ENCODER.encode(text), after))

    def _new_frame(self, choice: int) -> tuple[bytes, bytes]:
        """The bytes before and after the text in each chunk of a choice."""
        chunk = self._chunk(self._words.plain(choice, _MARK)).data
        before, _, after = chunk.partition(_MARK_JSON)
        self._frames[choice] = before, after
        return before, after

    def _chunks(self, choices: Sequence[ChunkChoice]) -> list[Payload]:
        return [self._chunk(choice) for choice in choices]

    def _chunk(self, choice: ChunkChoice, fingerprint: str | None = None) -> Payload:
        usage = self.usage if self._rendering.continuous_usage else None
        return self._encode((choice,), usage, fingerprint)

    def _encode(
        self,
        choices: Sequence[ChunkChoice],
        usage: Usage | None,
        fingerprint: str | None,
        receipt: str | None = None,
    ) -> Payload:
        chunk = Chunk(
            id=self._rendering.request_id,
            object=self._words.chunk_object,
            created=self._rendering.created,
            model=self._rendering.model,
            choices=choices,
            # If usage is requested, it is null in all chunks but the last.
            usage=usage if self._rendering.include_usage else UNSET,
            service_tier=self._tier or UNSET,
            system_fingerprint=fingerprint or UNSET,
            obfuscation=self._padding(choices) if self._rendering.is_obfuscated else UNSET,
            receipt=receipt or UNSET,
        )
        return Payload(ENCODER.encode(chunk))

    def _padding(self, choices: Sequence[ChunkChoice]) -> str:
        """Padding that hides the length of the text in this chunk."""
        said = ENCODER.encode(choices)
        empty = ENCODER.encode([self._words.plain(choice.index, "") for choice in choices])
        return obfuscation(said, len(said) - len(empty))


def whole_chat(builder: AnswerBuilder) -> ChatCompletion:
    """The answer to a request that does not stream."""
    rendering = builder.rendering
    scores = builder.prompt_scores[0]
    return ChatCompletion(
        id=rendering.request_id,
        created=rendering.created,
        model=rendering.model,
        choices=[_chat_choice(rendering, k, choice) for k, choice in enumerate(builder.choices)],
        usage=builder.usage,
        service_tier=rendering.service_tier or UNSET,
        system_fingerprint=builder.system_fingerprint or UNSET,
        prompt_logprobs=UNSET if rendering.prompt_logprobs is None else prompt_logprobs(scores),
        receipt=builder.receipt or UNSET,
    )


def _chat_choice(rendering: Rendering, index: int, choice: AnswerChoice) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=_message(rendering, choice),
        logprobs=_chat_logprobs(rendering, choice.logprobs),
        finish_reason=finish_reason(
            rendering, choice.finish_reason, has_called=choice.reader.has_called
        ),
        stop_reason=or_unset(choice.stop_reason),
    )


def _message(rendering: Rendering, choice: AnswerChoice) -> ChatCompletionMessage:
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


def _chat_logprobs(rendering: Rendering, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
    if rendering.logprobs is None:
        return None
    return chat_logprobs(tokens, as_ids=rendering.tokens_as_ids) if tokens else None


def whole_completion(builder: AnswerBuilder) -> Completion:
    """The answer to a request that does not stream."""
    rendering = builder.rendering
    return Completion(
        id=rendering.request_id,
        created=rendering.created,
        model=rendering.model,
        choices=[_text_choice(builder, k, choice) for k, choice in enumerate(builder.choices)],
        usage=builder.usage,
        system_fingerprint=builder.system_fingerprint or UNSET,
        receipt=builder.receipt or UNSET,
    )


def _text_choice(builder: AnswerBuilder, index: int, choice: AnswerChoice) -> TextChoice:
    rendering = builder.rendering
    prompt = choice.index // rendering.num_drawn
    echo = builder.prompt_texts[prompt] if rendering.echo else ""
    return TextChoice(
        index=index,
        text=echo + choice.text,
        logprobs=None
        if rendering.logprobs is None
        else _text_logprobs(builder, choice, prompt, echo),
        finish_reason=choice.finish_reason,
        stop_reason=or_unset(choice.stop_reason),
        prompt_logprobs=(
            UNSET
            if rendering.prompt_logprobs is None
            else prompt_logprobs(builder.prompt_scores[prompt])
        ),
    )


def _text_logprobs(
    builder: AnswerBuilder, choice: AnswerChoice, prompt: int, echo: str
) -> TextLogprobs:
    scale = TextScale(as_ids=builder.rendering.tokens_as_ids)
    if not builder.rendering.echo:
        return scale.read(choice.logprobs)
    echoed = scale.echo(echo, builder.prompt_ids[prompt], builder.prompt_scores[prompt])
    return joined(echoed, scale.read(choice.logprobs))

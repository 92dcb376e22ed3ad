"""Renders logs as a gateway does, without a gateway and without a broker."""

import json
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gateway.api.event_stream import encoder_for
from gateway.api.render import whole_answer
from gateway.api.render.answer_builder import AnswerBuilder
from gateway.api.render.formats import Rendering
from gateway.log.cursor import LogEvent
from gateway.log.framing import EventId, FramedEncoder, Framer
from gateway.log.visiting import visit
from shared.log import LogReader, LogWriter, Relay
from shared.messages import (
    Finished,
    FinishReason,
    Logprob,
    PromptScores,
    Started,
    TokenDelta,
    TokenLogprobs,
)


def context_of(**fields: Any) -> Rendering:
    """A streamed chat, unless ``fields`` change that."""
    defaults: dict[str, Any] = {
        "endpoint": "chat",
        "request_id": "chatcmpl-1",
        "model": "m",
        "created": 17,
        "is_stream": True,
    }
    return Rendering(**{**defaults, **fields})


END = "<|im_end|>"
"""The last token of a choice, if it is not part of its text."""


class Log:
    """The log of a request. The id of a token is its number of bytes."""

    def __init__(self, rendering: Rendering, *, prompts: Sequence[Sequence[str]] = ()) -> None:
        self.rendering = rendering
        self.prompts = prompts or [["a", " b", " c"]] * rendering.num_prompts
        self.events: list[LogEvent] = []
        self._reader = LogReader(rendering.request_id, rendering.total_drawn)
        self._writer = LogWriter(1, rendering.total_drawn)
        self._add(
            Started(
                worker="worker.w",
                ticket="t",
                num_prompt_tokens=tuple(map(len, self.prompts)),
                prompt_texts=tuple(map("".join, self.prompts)),
            )
        )

    def score(self, size: int = 2) -> "Log":
        """The prompts' logprobs, with ``size`` tokens per event."""
        for prompt, tokens in enumerate(self.prompts):
            told = [None, *(told_as(token) for token in tokens[1:])]
            for start in range(0, len(tokens), size):
                self._add(
                    PromptScores(
                        prompt=prompt,
                        attempt=1,
                        start=start,
                        token_ids=tuple(len(t.encode()) for t in tokens[start : start + size]),
                        logprobs=tuple(told[start : start + size]),
                    )
                )
        return self

    def say(self, *tokens: str, choice: int = 0) -> "Log":
        """Write an event for each token."""
        for token in tokens:
            token_ids, logprobs = [len(token.encode())], self._logprobs(token)
            self._add(self._writer.delta(choice, token_ids, token, logprobs=logprobs))
        return self

    def finish(
        self,
        text: str = "",
        reason: FinishReason = "stop",
        *,
        choice: int = 0,
        stop_reason: str | int | None = None,
        num_cached_tokens: int = 0,
    ) -> "Log":
        """The last token of a choice."""
        self._add(
            self._writer.finish(
                choice,
                [len(text.encode())],
                "" if text == END else text,
                reason,
                stop_reason,
                num_cached_tokens=num_cached_tokens,
                logprobs=self._logprobs(text),
                has_end_token=text == END,
            )
        )
        return self

    def stop_at(self, stop: str, tokens: Sequence[tuple[str, str]], *, num_events: int) -> "Log":
        """Tokens up to a stop string, each with the text that is passed on with it, in so many
        events."""
        size = -(-len(tokens) // num_events)
        for start in range(0, len(tokens), size):
            names, texts = zip(*tokens[start : start + size], strict=True)
            token_ids = [len(name.encode()) for name in names]
            more: Any = {"num_chars": [len(text) for text in texts[:-1]]}
            more["logprobs"] = tuple(one for name in names for one in self._logprobs(name))
            if start + size < len(tokens):
                self._add(self._writer.delta(0, token_ids, "".join(texts), **more))
            else:
                self._add(self._writer.finish(0, token_ids, "".join(texts), "stop", stop, **more))
        return self

    def tell(self, texts: Sequence[Sequence[str]], dice: random.Random) -> "Log":
        """All tokens of each choice, split at random points, with the choices in random order.

        The text of a choice's last token is held back until its end.
        """
        rests = [list(tokens) for tokens in texts]
        while open_choices := [choice for choice, rest in enumerate(rests) if rest]:
            choice = dice.choice(open_choices)
            size = dice.randint(1, len(rests[choice]))
            tokens, rests[choice] = rests[choice][:size], rests[choice][size:]
            token_ids = [len(token.encode()) for token in tokens]
            logprobs = tuple(one for token in tokens for one in self._logprobs(token))
            has_end_token = tokens[-1] == END
            text = "".join(tokens[:-1] if has_end_token else tokens)
            more: Any = {"num_chars": [len(token) for token in tokens[:-1]], "logprobs": logprobs}
            if rests[choice]:
                self._add(self._writer.delta(choice, token_ids, text, **more))
            elif has_end_token:
                more["has_end_token"] = True
                self._add(self._writer.finish(choice, token_ids, text, "stop", **more))
            elif dice.random() < 0.5:
                sure, held = "".join(tokens[:-1]), tokens[-1]
                self._add(self._writer.delta(choice, token_ids, sure, **more))
                self._add(self._writer.finish(choice, [], held, "stop"))
            else:
                self._add(self._writer.finish(choice, token_ids, text, "stop", **more))
        return self

    def fail(self, code: str) -> "Log":
        self._add(self._writer.fail(code, "Sorry."))
        return self

    def payloads(self) -> list[tuple[str | None, bytes]]:
        """The data of all events, in order."""
        encoder, framer = encoder_for(self.rendering), Framer(is_numbered=False)
        sent = b"".join([visit(event, FramedEncoder(framer, encoder)) for event in self.events])
        if isinstance(self.events[-1], Finished) and self._reader.is_ended:
            sent += framer.frame_between(encoder.end())
        found = re.findall(rb"(?:event: (\S+)\n)?data: (.+)\n\n", sent)
        return [(event.decode() or None, data) for event, data in found]

    def frames(self, after: str = "") -> list[tuple[str, bytes]]:
        """The ids and data of what is sent to a client that has seen ``after``."""
        encoder, framer = encoder_for(self.rendering), Framer(EventId.parse(after))
        sent = b"".join([visit(event, FramedEncoder(framer, encoder)) for event in self.events])
        sent += framer.frame_between(encoder.end())
        found = re.findall(rb"id: (\S+)\n(?:event: \S+\n)?data: (.+)\n\n", sent)
        return [(event_id.decode(), data) for event_id, data in found]

    def chunks(self) -> list[Any]:
        """The JSON values of all events."""
        return [json.loads(data) for _, data in self.payloads() if data != b"[DONE]"]

    def whole(self) -> dict[str, Any]:
        """The response without streaming."""
        builder = AnswerBuilder(self.rendering)
        for event in self.events:
            builder.read(event)
        body = whole_answer(builder)
        answer: dict[str, Any] = json.loads(msgspec.json.encode(body))
        return answer

    def _logprobs(self, token: str) -> tuple[TokenLogprobs, ...]:
        return () if self.rendering.logprobs is None else (told_as(token),)

    def _add(self, event: Started | PromptScores | TokenDelta | Finished | Any) -> None:
        actions = self._reader.read(event)
        self.events += [action.event for action in actions if isinstance(action, Relay)]


def told_as(token: str) -> TokenLogprobs:
    """A token that was only the second most likely."""
    return TokenLogprobs(
        chosen=Logprob(len(token.encode()), -2.0, token.encode()),
        top=(Logprob(99, -1.0, b"best"), Logprob(len(token.encode()), -2.0, token.encode())),
    )


def joined(chunks: Iterable[Any], key: str, choice: int = 0) -> str:
    """All text under ``key`` in the deltas of a choice."""
    return "".join(
        found["delta"].get(key) or ""
        for chunk in chunks
        for found in chunk["choices"]
        if found["index"] == choice
    )

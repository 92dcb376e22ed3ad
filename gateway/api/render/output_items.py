"""The output items of a response, and their events in a stream."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gateway.api.render.choice_reader import Part, merged
from gateway.api.render.formats import Rendering, StreamEvent, call_id
from gateway.api.render.logprobs import chat_logprobs
from gateway.text.pieces import CallArguments, CallInput, CallStart, Content, Piece, Reasoning
from shared.messages import TokenLogprobs

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9]+")

_TEXT: Mapping[type[Piece], tuple[str, str, str, str]] = {
    Content: ("message", "msg", "output_text", "response.output_text"),
    Reasoning: ("reasoning", "rs", "reasoning_text", "response.reasoning_text"),
}
"""The item type, the prefix of its id, the part type and the event of each kind of text."""


_CALLS: Mapping[str, tuple[str, str, str]] = {
    "function_call": ("fc", "arguments", "response.function_call_arguments"),
    "custom_tool_call": ("ctc", "input", "response.custom_tool_call_input"),
}
"""The prefix of the id, the field with the tool's input, and the prefix of the events, for each
item type of a call."""


def response_of(item_id: str) -> str | None:
    """The id of the response whose output has the item, if it is an output item's id."""
    named = _ITEM_ID.fullmatch(item_id)
    return f"resp_{named[1]}" if named else None


class ItemWriter:
    """Writes items one after the other, because the pieces of a text have an order."""

    def __init__(self, rendering: Rendering) -> None:
        self._items: list[dict[str, Any]] = []
        self._rendering = rendering
        self._open: _OpenText | _OpenCall | None = None
        self._logprobs: list[TokenLogprobs] = []
        """The logprobs of the tokens since the last piece."""

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items that have begun; the last item may be open."""
        if isinstance(self._open, _OpenText):
            return [*self._items[:-1], self._open.snapshot()]
        return self._items

    def write(self, parts: Iterable[Part]) -> list[StreamEvent]:
        """The next parts of the text.

        A piece has the logprobs of all tokens after the piece before, because a token may complete
        no text; only the logprobs of a message are written.
        """
        joined: list[tuple[Piece, list[TokenLogprobs]]] = []
        for piece, logprobs in self._scored(parts):
            both = merged([joined[-1][0], piece]) if joined else []
            if len(both) == 1:
                joined[-1] = both[0], joined[-1][1] + logprobs
            else:
                joined.append((piece, logprobs))
        return [event for piece, logprobs in joined for event in self._write(piece, logprobs)]

    def close(self, *, is_complete: bool = True) -> list[StreamEvent]:
        """End the text. An empty text also has a message."""
        events = [] if self._items else self._begin_text(Content)
        return events + self._end("completed" if is_complete else "incomplete")

    def cut_off(self) -> list[StreamEvent]:
        """The text ends in its middle: the open item stays incomplete."""
        return self._end("incomplete")

    def _scored(self, parts: Iterable[Part]) -> Iterator[tuple[Piece, list[TokenLogprobs]]]:
        for pieces, logprobs in parts:
            self._logprobs += logprobs
            for piece in pieces:
                yield piece, self._logprobs
                self._logprobs = []

    def _write(self, piece: Piece, logprobs: Sequence[TokenLogprobs]) -> list[StreamEvent]:
        match piece:
            case Content(text) | Reasoning(text):
                kind = type(piece)
                is_going_on = isinstance(self._open, _OpenText) and self._open.kind is kind
                begun = [] if is_going_on else [*self._end("completed"), *self._begin_text(kind)]
                assert isinstance(self._open, _OpenText)
                words = chat_logprobs(logprobs, as_ids=self._rendering.tokens_as_ids).content
                return [*begun, self._open.add(text, msgspec.to_builtins(words))]
            case CallStart(index, name, is_custom):
                item_type = "custom_tool_call" if is_custom else "function_call"
                return [*self._end("completed"), *self._begin_call(item_type, index, name)]
            case CallArguments(_, text) | CallInput(_, text):
                assert isinstance(self._open, _OpenCall)
                return [self._open.add(text)]

    def _begin_text(self, kind: type[Content] | type[Reasoning]) -> list[StreamEvent]:
        self._open = _OpenText(kind, self._id(_TEXT[kind][1]), len(self._items))
        self._items.append(self._open.item)
        return self._open.begin()

    def _begin_call(self, item_type: str, index: int, name: str) -> list[StreamEvent]:
        id_prefix, said, _ = _CALLS[item_type]
        item = {
            "id": self._id(id_prefix),
            "type": item_type,
            "call_id": call_id(self._rendering, 0, index, name),
            "name": name,
            said: "",
            "status": "in_progress",
        }
        self._open = _OpenCall(item, len(self._items))
        self._items.append(item)
        return [_item_event("added", len(self._items) - 1, item)]

    def _end(self, status: str) -> list[StreamEvent]:
        if self._open is None:
            return []
        events, self._open = self._open.end(status), None
        return events

    def _id(self, kind: str) -> str:
        name = self._rendering.request_id.removeprefix("resp_")
        return f"{kind}_{name}{len(self._items)}"


class _OpenText:
    """A message or a thought, whose text is still coming."""

    def __init__(self, kind: type[Content] | type[Reasoning], item_id: str, index: int) -> None:
        item_type, _, self._part_type, self._event = _TEXT[kind]
        self.kind = kind
        self.item: dict[str, Any] = {
            "id": item_id,
            "type": item_type,
            "status": "in_progress",
            "content": [],
        }
        if kind is Content:
            self.item["role"] = "assistant"
        else:
            self.item["summary"] = []
        self._place = {"item_id": item_id, "output_index": index, "content_index": 0}
        self._text: list[str] = []
        self._logprobs: list[Any] = []

    def begin(self) -> list[StreamEvent]:
        added = _item_event("added", self._place["output_index"], self.item)
        part = {"type": "response.content_part.added", **self._place, "part": self._part()}
        return [added, part]

    def add(self, text: str, logprobs: list[Any]) -> StreamEvent:
        self._text.append(text)
        self._logprobs += logprobs
        return {
            "type": f"{self._event}.delta",
            **self._place,
            "delta": text,
            **self._more(logprobs),
        }

    def snapshot(self) -> dict[str, Any]:
        """The item, as far as it has been generated."""
        return {**self.item, "content": [self._part()]}

    def end(self, status: str) -> list[StreamEvent]:
        part = self._part()
        self.item["content"], self.item["status"] = [part], status
        more = self._more(self._logprobs)
        done = {"type": f"{self._event}.done", **self._place, "text": part["text"], **more}
        part_done = {"type": "response.content_part.done", **self._place, "part": part}
        return [done, part_done, _item_event("done", self._place["output_index"], self.item)]

    def _more(self, logprobs: Sequence[Any]) -> StreamEvent:
        """The logprobs of an event: unlike the logprobs of a part, they have no bytes."""
        return (
            {"logprobs": [_without_bytes(one) for one in logprobs]} if self.kind is Content else {}
        )

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._part_type, "text": "".join(self._text)}
        if self.kind is Content:
            part |= {"annotations": [], "logprobs": list(self._logprobs)}
        return part


class _OpenCall:
    """A call, whose arguments or input are still coming."""

    def __init__(self, item: dict[str, Any], index: int) -> None:
        self._item = item
        self._place = {"item_id": item["id"], "output_index": index}
        _, self._said, self._event = _CALLS[item["type"]]

    def add(self, text: str) -> StreamEvent:
        self._item[self._said] += text
        return {"type": f"{self._event}.delta", **self._place, "delta": text}

    def end(self, status: str) -> list[StreamEvent]:
        self._item["status"] = status
        done = {
            "type": f"{self._event}.done",
            **self._place,
            **({"name": self._item["name"]} if self._said == "arguments" else {}),
            self._said: self._item[self._said],
        }
        return [done, _item_event("done", self._place["output_index"], self._item)]


def _without_bytes(logprob: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "token": logprob["token"],
        "logprob": logprob["logprob"],
        "top_logprobs": [
            {"token": other["token"], "logprob": other["logprob"]}
            for other in logprob["top_logprobs"]
        ],
    }


def _item_event(what: str, index: Any, item: Mapping[str, Any]) -> StreamEvent:
    # The event has a copy of the item, because the item changes further after the event was sent.
    return {"type": f"response.output_item.{what}", "output_index": index, "item": dict(item)}

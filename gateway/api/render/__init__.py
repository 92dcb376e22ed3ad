"""Renders the events of a log in the format of each endpoint, as whole answers and as payloads of a
stream.

`encoder_for`, `ping_for` and `whole_answer` choose by the endpoint. `gathering` collects whole
answers.
"""

from gateway.api.render.chat_completions import (
    ChatChunks,
    ChunkEncoder,
    TextChunks,
    whole_chat,
    whole_completion,
)
from gateway.api.render.gathering import Gathering
from gateway.api.render.messages import PING as MESSAGES_PING
from gateway.api.render.messages import MessageEncoder, whole_message
from gateway.api.render.responses import ResponseEncoder, gathered_response
from gateway.api.rendering import Rendering
from gateway.log.framing import PING, StreamEncoder


def encoder_for(rendering: Rendering) -> StreamEncoder:
    """The encoder of a request's stream, from the first event of its log."""
    match rendering.endpoint:
        case "chat":
            return ChunkEncoder(rendering, ChatChunks(rendering))
        case "completions":
            return ChunkEncoder(rendering, TextChunks(rendering))
        case "responses":
            return ResponseEncoder(rendering)
        case "messages":
            return MessageEncoder(rendering)


def ping_for(rendering: Rendering | None) -> bytes:
    """What keeps an idle connection open. Anthropic's clients expect an event, and may count
    events to detect that a stream has stalled."""
    is_messages = rendering is not None and rendering.endpoint == "messages"
    return MESSAGES_PING if is_messages else PING


def whole_answer(gathering: Gathering) -> object:
    """The body that answers a request which does not stream."""
    match gathering.rendering.endpoint:
        case "chat":
            return whole_chat(gathering)
        case "completions":
            return whole_completion(gathering)
        case "responses":
            return gathered_response(gathering)
        case "messages":
            return whole_message(gathering)

"""Which words an endpoint has for its answers."""

from gateway.chat_format import ChatChunks, whole_chat
from gateway.choices import Gathering
from gateway.chunks import ChunkEncoder
from gateway.completion_format import TextChunks, whole_completion
from gateway.context import StreamContext
from gateway.responses.format import ResponseEncoder, gathered_response
from gateway.sse import StreamEncoder
from gateway.usage import Usage


def encoder_for(context: StreamContext) -> StreamEncoder:
    """What words the stream of a request, from its log's first event on."""
    match context.endpoint:
        case "chat":
            return ChunkEncoder(context, ChatChunks(context))
        case "completions":
            return ChunkEncoder(context, TextChunks(context))
        case "responses":
            return ResponseEncoder(context)


def whole_answer(gathering: Gathering, usage: Usage) -> object:
    """The body that answers a request which does not stream."""
    match gathering.context.endpoint:
        case "chat":
            return whole_chat(gathering, usage)
        case "completions":
            return whole_completion(gathering, usage)
        case "responses":
            return gathered_response(gathering, usage)

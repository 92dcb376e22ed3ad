"""Which words an endpoint has for its answers."""

from gateway.answers.chat import ChatChunks, whole_chat
from gateway.answers.choices import Gathering
from gateway.answers.chunks import ChunkEncoder
from gateway.answers.completion import TextChunks, whole_completion
from gateway.answers.context import StreamContext
from gateway.answers.sse import StreamEncoder
from gateway.answers.usage import Usage
from gateway.responses.format import ResponseEncoder, gathered_response


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

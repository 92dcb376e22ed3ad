"""Renders the events of a log in the format of each endpoint, as whole answers and as payloads of a
stream.

`whole_answer` chooses by the endpoint. `answer_builder` collects whole answers.
"""

from gateway.api.render.answer_builder import AnswerBuilder
from gateway.api.render.chat_completions import whole_chat, whole_completion
from gateway.api.render.messages import whole_message
from gateway.api.render.responses import build_response


def whole_answer(builder: AnswerBuilder) -> object:
    """The body that answers a request which does not stream."""
    match builder.rendering.endpoint:
        case "chat":
            return whole_chat(builder)
        case "completions":
            return whole_completion(builder)
        case "responses":
            return build_response(builder)
        case "messages":
            return whole_message(builder)

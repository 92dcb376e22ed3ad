"""Renders the events of a log in the format of each endpoint, as whole answers and as payloads of a
stream.

`whole_answer` chooses by the endpoint. `gathering` collects whole answers.
"""

from gateway.api.render.chat_completions import whole_chat, whole_completion
from gateway.api.render.gathering import Gathering
from gateway.api.render.messages import whole_message
from gateway.api.render.responses import gathered_response


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

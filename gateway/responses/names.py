"""What a chat and its stream call otherwise than the Responses API does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shared.errors import RequestError, StreamExpired, StreamNotFound

NAMES: Mapping[str, str] = {
    "detach": "background",
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""What a chat's parameters are called here."""
_PARTS: Mapping[str, str] = {
    "response_format.json_schema": "text.format.schema",
    "response_format.json_schema.schema": "text.format.schema",
}


@contextmanager
def in_own_words(paths: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise errors about a chat or a stream as errors about a response. ``paths``: where the parts
    of the chat's body stand in the response's."""
    try:
        yield
    except StreamNotFound:
        raise StreamNotFound("There is no such response.") from None
    except StreamExpired:
        raise StreamExpired("This response is no longer kept.") from None
    except RequestError as error:
        raise _renamed(error, {**NAMES, **_PARTS, **(paths or {})}) from None


def _renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    param = error.param or ""
    known = [name for name in names if f"{param}.".startswith((f"{name}.", f"{name}["))]
    if not known:
        return error
    longest = max(known, key=len)
    ours = names[longest] + param.removeprefix(longest)
    message = error.message
    if message.startswith(param):
        message = ours + message.removeprefix(param)
    return type(error)(message, param=ours)

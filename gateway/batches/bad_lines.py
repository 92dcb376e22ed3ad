"""The faults of a line of a batch, in the same words wherever it is checked: by a gateway, or by
``warren batch``, which has no API keys and may have no workers."""

from contextlib import suppress

import msgspec

from gateway.api.bodies.parsing import json_fault, refused, with_choices
from gateway.api.bodies.quick import EmbeddingRequest, QuickDraft
from gateway.api.bodies.submission import submission
from gateway.batches.lines import ENDPOINTS, LINE_DECODER, UNREADABLE, LineRequest, RequestLine
from gateway.intake.admission import count_values
from shared.errors import InvalidRequest, RequestError, Unavailable

_MAX_SHOWN_CHARS = 64


class BadInput(Exception):
    """The fault of a line of a batch, or of its file."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    @classmethod
    def of_request(cls, error: RequestError) -> "BadInput":
        """An error in the body of a line."""
        return cls(
            error.code, error.message, None if error.param is None else f"body.{error.param}"
        )


def read_line(text: bytes) -> RequestLine:
    """Parse a line, except for the body of its request. Raises `BadInput`."""
    try:
        count_values(text)
        return LINE_DECODER.decode(text)
    except InvalidRequest as error:
        raise BadInput(error.code, error.message) from None
    except msgspec.ValidationError as error:
        message = with_choices(str(error), RequestLine)
        reason, _, path = message.partition(" - at `$")
        missing = reason.partition("missing required field `")[2].rstrip("`")
        param = missing or path.rstrip("`").lstrip(".") or None
        raise BadInput("invalid_line", message, param) from None
    except UNREADABLE as error:
        reason = json_fault(text, error)
        raise BadInput("invalid_json_line", f"The line is not valid JSON: {reason}") from None


def repeated(custom_id: str) -> BadInput:
    """The fault of a line whose ``custom_id`` an earlier line has."""
    message = f"The custom_id {custom_id[:_MAX_SHOWN_CHARS]!r} is not unique."
    return BadInput("duplicate_custom_id", message, "custom_id")


def require_url(line: RequestLine, endpoint: str) -> None:
    """Raises `BadInput` unless the line is for the endpoint of its batch."""
    if line.url != endpoint:
        message = f"The URL is not {endpoint}, which is the batch's endpoint."
        raise BadInput("mismatched_url", message, "url")


def required(model: str | None) -> str:
    """The model, which every line names. Raises `InvalidRequest`."""
    if not model:
        raise refused("model", "expected the name of a model.")
    return model


def check_alone(line: RequestLine) -> LineRequest:
    """Check the request of a line as far as it is possible without workers and API keys; returns
    its parsed body. Raises `RequestError`."""
    request = ENDPOINTS[line.url].read(bytes(line.body))
    if isinstance(request, EmbeddingRequest):
        request.job(QuickDraft(required(request.model), "check", 0.0, ""))
        return request
    with request.translate_errors():
        required(request.body.model)
        with suppress(Unavailable):  # tools need a worker
            submission(
                request.body, request_id="check", created_at=0.0, echoed=request.echoed
            ).check_constraint_now()
    return request

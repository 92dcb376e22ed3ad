"""The lines of a batch's output file, in the format of OpenAI's Batch API."""

import msgspec

from gateway.api.render import whole_answer
from gateway.api.render.formats import rendering_of
from gateway.api.render.gathering import Gathering
from gateway.errors import error_body, status_of
from shared import errors
from shared.errors import InternalError
from shared.messages import Completed, Failed, GenerationJob


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP response that the endpoint would have given."""

    status_code: int
    request_id: str
    body: object


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. A failed line has a `Response` too, with the status code and the error."""

    id: str
    custom_id: str
    response: Response
    error: None = None


def output_line(custom_id: str, job: GenerationJob, answer: Completed | Failed) -> bytes:
    """Encode the answer to a line as one output line, without a line end."""
    response = _completed(job, answer) if isinstance(answer, Completed) else _failed(job, answer)
    output = OutputLine(id=f"batch_req_{job.request_id}", custom_id=custom_id, response=response)
    return msgspec.json.encode(output)


def _completed(job: GenerationJob, completed: Completed) -> Response:
    if len(completed.choices) != job.total_choices:
        return _failed(job, Failed(code=InternalError.code, message="Choices are missing."))
    gathering = Gathering(rendering_of(job.context))
    gathering.take(completed)
    return Response(status_code=200, request_id=job.request_id, body=whole_answer(gathering))


def _failed(job: GenerationJob, failed: Failed) -> Response:
    error = errors.from_code(failed.code, failed.message, failed.param)
    return Response(
        status_code=status_of(error).code,
        request_id=job.request_id,
        body=error_body(error),
    )

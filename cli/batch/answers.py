"""The lines of a batch's output file, in the format of OpenAI's Batch API."""

from gateway.api.render import whole_answer
from gateway.api.render.answer_builder import AnswerBuilder
from gateway.api.render.formats import rendering_of
from gateway.batches.lines import LineOutcome
from shared.errors import InternalError, from_code
from shared.messages import Completed, Failed, GenerationJob


def output_line(custom_id: str, job: GenerationJob, answer: Completed | Failed) -> bytes:
    """Encode the answer to a line as an output line, without a line end. A failed line has the
    status code and the body of the endpoint's response, too."""
    outcome = LineOutcome(job.request_id, _body(job, answer))
    return outcome.line(f"batch_req_{job.request_id}", custom_id)


def _body(job: GenerationJob, answer: Completed | Failed) -> object:
    """The body that the endpoint would have given, or the error."""
    if isinstance(answer, Failed):
        return from_code(answer.code, answer.message, answer.param)
    if len(answer.choices) != job.total_choices:
        return InternalError("Choices are missing.")
    builder = AnswerBuilder(rendering_of(job.context))
    builder.take(answer)
    return whole_answer(builder)

"""The lines of a batch's output, in OpenAI's shape."""

import msgspec

from gateway import http_errors
from gateway.batch.lines import BatchLine
from gateway.formats import (
    Answer,
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    PromptTokensDetails,
    Usage,
)
from gateway.http_errors import ErrorBody
from shared import errors
from shared.messages import Completed, Failed


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What the endpoint would have answered over HTTP."""

    status_code: int
    request_id: str
    body: Answer | ErrorBody


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. A line that failed has a `Response` too, with the status and the error."""

    id: str
    custom_id: str
    response: Response
    error: None = None


_FORMATS: dict[str, AnswerFormat] = {
    "/v1/chat/completions": ChatFormat(),
    "/v1/completions": CompletionFormat(),
}


def output_line(
    line: BatchLine, model: str, request_id: str, answer: Completed | Failed, created_at: float
) -> bytes:
    """Word the answer to ``line``, without a line end."""
    response = (
        _completed(_FORMATS[line.url], model, answer, created_at)
        if isinstance(answer, Completed)
        else _failed(request_id, answer)
    )
    output = OutputLine(id=f"batch_req_{request_id}", custom_id=line.custom_id, response=response)
    return msgspec.json.encode(output)


def _completed(
    words: AnswerFormat, model: str, completed: Completed, created_at: float
) -> Response:
    num_prompt_tokens = sum(choice.num_prompt_tokens for choice in completed.choices)
    num_output_tokens = sum(len(choice.token_ids) for choice in completed.choices)
    num_cached_tokens = sum(choice.num_cached_tokens for choice in completed.choices)
    answer = Answer(
        id=completed.request_id,
        object=words.answer_object,
        created=int(created_at),
        model=model,
        choices=[words.whole(k, choice.text, choice) for k, choice in enumerate(completed.choices)],
        usage=Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(num_cached_tokens),
        ),
    )
    return Response(status_code=200, request_id=completed.request_id, body=answer)


def _failed(request_id: str, failed: Failed) -> Response:
    error = errors.from_code(failed.code, failed.message, failed.param)
    return Response(
        status_code=http_errors.status_of(error).code,
        request_id=request_id,
        body=http_errors.error_body(error),
    )

"""Bodies in, jobs out. What may stand where is decided before anything is published."""

import re
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from gateway.api.bodies.json_values import misfit
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from gateway.api.bodies.structured_output import (
    PARAMETERS,
    Wanted,
    after_reasoning,
    wanted_constraint,
)
from gateway.api.bodies.tool_choice import ToolUse, tool_use
from gateway.log.context import StreamContext
from gateway.text.reasoning import REASONING_PARSERS
from shared.errors import InvalidRequest
from shared.messages import (
    MAX_BIASES,
    MAX_CHOICES,
    Announcement,
    ChatPrompt,
    GenerationJob,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)

_MAX_TOLD = 1024
"""Logprobs of one position of all choices together."""
_MAX_SCORED = 1 << 23
"""Logprobs of all prompts together."""
_COPIED = frozenset(SamplingParams.__struct_fields__) - {
    "constraint",
    "logprobs",
    "max_tokens",
    "logit_bias",
    "stop",
}
"""What bodies say in the words of `SamplingParams`."""
_TOKEN_ID = re.compile(r"\d{1,10}", re.ASCII)

GenerationBody: TypeAlias = ChatRequest | CompletionRequest


class Draft(NamedTuple):
    """A job without its context, and the constraint that is to be checked before it is
    published."""

    job: GenerationJob
    context: StreamContext
    wanted: Wanted | None

    def identified(
        self, request_id: str, *, tenant: str = "", body_hash: str = ""
    ) -> GenerationJob:
        """The job to publish, under this id and for a tenant. Raises `InvalidRequest`."""
        context = msgspec.structs.replace(
            self.context, request_id=request_id, tenant=tenant, body_hash=body_hash
        )
        return msgspec.structs.replace(
            self.job, request_id=request_id, tenant=tenant, context=context.encode()
        )


def draft(
    request: GenerationBody,
    *,
    request_id: str,
    created_at: float,
    deadline: float | None = None,
    mode: Literal["stream", "final"] = "stream",
    served: Announcement | None = None,
) -> Draft:
    """Build the job of a request. ``served`` is what a worker says of the model, if one is there.

    Raises `InvalidRequest` naming what is out of its limits, and `Unavailable`.
    """
    calls = tool_use(
        request.tools,
        request.tool_choice,
        is_parallel=request.parallel_tool_calls,
        served=served,
    )
    wanted = _wanted(request, calls, served)
    best_of = request.best_of or 0
    num_choices = 1 if request.n is None else request.n
    job = _converted(
        {
            "type": GenerationJob.__struct_config__.tag,
            "request_id": request_id,
            "model": request.model,
            "prompts": _prompts(request, calls),
            "num_choices": best_of or num_choices,
            "sampling": _sampling(request, wanted, calls),
            "mode": mode,
            "created_at": created_at,
            "deadline": deadline,
            "is_detached": request.detach,
            "wants_prompt_text": request.echo,
        },
        request,
    )
    _check_sizes(request, job, num_choices, served)
    context = _context(request, job, num_choices, calls, served)
    return Draft(job, context, wanted)


def _wanted(
    request: GenerationBody, calls: ToolUse | None, served: Announcement | None
) -> Wanted | None:
    names = request.model_fields_set & PARAMETERS
    wanted = wanted_constraint({name: getattr(request, name) for name in names}) if names else None
    if calls is not None and calls.constraint is not None:
        if wanted is not None:
            raise InvalidRequest(
                f"{wanted.param}: not together with tools that have to be called.",
                param=wanted.param,
            )
        return Wanted("tools", calls.constraint, calls.schemas)
    parser = _reasoning_parser(request, served)
    return wanted and wanted._replace(constraint=after_reasoning(wanted.constraint, parser))


def _reasoning_parser(request: GenerationBody, served: Announcement | None) -> str | None:
    if served is None or request.endpoint != "chat":
        return None
    parser = served.reasoning_parser
    return parser if parser in REASONING_PARSERS else None


def _prompts(request: GenerationBody, calls: ToolUse | None) -> list[dict[str, Any]]:
    prompts = request.prompts()
    if calls is not None:
        prompts[0]["tools"] = [msgspec.to_builtins(tool) for tool in calls.tools]
    return prompts


def _sampling(
    request: GenerationBody, wanted: Wanted | None, calls: ToolUse | None
) -> dict[str, Any]:
    """What the client said; `SamplingParams` has the defaults for the rest."""
    said: dict[str, Any] = {
        name: getattr(request, name) for name in request.model_fields_set & _COPIED
    }
    said["include_stop_in_output"] = request.include_stop_str_in_output
    said["logprobs"] = request.num_logprobs()
    if (limit := request.token_limit()) is not None:
        said["max_tokens"] = limit
    if request.top_k == -1:
        said["top_k"] = 0
    if request.stop is not None:
        said["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
        said["stop"] = said["stop"] if said["stop"] != [""] else []
    if request.logit_bias is not None:
        said["logit_bias"] = _biases(request.logit_bias)
    if wanted is not None:
        said["constraint"] = msgspec.to_builtins(wanted.constraint)
    if calls is not None and calls.parser != "hermes":
        # Their tags are special tokens.
        said["skip_special_tokens"] = False
    # What `echo` and `best_of` need besides.
    if request.echo and said["logprobs"] is not None:
        said["prompt_logprobs"] = max(said["logprobs"], request.prompt_logprobs or 0)
    if (request.best_of or 0) > (request.n or 1):
        said["logprobs"] = said["logprobs"] or 0
    return said


def _biases(biases: dict[str, Any]) -> dict[int, Any]:
    if len(biases) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias: more than {MAX_BIASES} entries.", param="logit_bias")
    for token_id in biases:
        if _TOKEN_ID.fullmatch(token_id) is None:
            raise InvalidRequest("logit_bias: expected token ids.", param="logit_bias")
    return {int(token_id): bias for token_id, bias in biases.items()}


def _context(
    request: GenerationBody,
    job: GenerationJob,
    num_choices: int,
    calls: ToolUse | None,
    served: Announcement | None,
) -> StreamContext:
    return StreamContext(
        endpoint=request.endpoint,
        request_id=job.request_id,
        model=job.model,
        created=int(job.created_at),
        num_prompts=len(job.prompts),
        is_detached=job.is_detached,
        num_choices=num_choices,
        best_of=job.num_choices if job.num_choices > num_choices else 0,
        is_stream=request.stream,
        include_usage=request.include_usage,
        continuous_usage=request.continuous_usage,
        echo=job.wants_prompt_text,
        logprobs=request.num_logprobs(),
        prompt_logprobs=request.prompt_logprobs,
        tokens_as_ids=request.return_tokens_as_token_ids,
        tool_parser=calls.parser if calls else None,
        is_forced=calls is not None and calls.constraint is not None,
        is_single_call=calls is not None and calls.is_single,
        reasoning_parser=_reasoning_parser(request, served),
        include_reasoning=request.include_reasoning,
        fingerprint=served.fingerprint if served else None,
    )


def _check_sizes(
    request: GenerationBody, job: GenerationJob, num_choices: int, served: Announcement | None
) -> None:
    """Refuse what multiplies too far, and what contradicts itself."""
    sampling = job.sampling
    if job.num_choices < num_choices:
        raise _refused("best_of", "less than n.")
    if job.num_choices > num_choices and request.stream:
        raise _refused("best_of", "not with stream, unless it is n.")
    if job.total_choices > MAX_CHOICES:
        raise _refused("n", f"more than {MAX_CHOICES} choices of all prompts together.")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise _refused("min_tokens", "more than max_tokens.")
    if request.prompt_logprobs is not None and request.stream:
        raise _refused("prompt_logprobs", "not with stream.")
    if sampling.logprobs is not None and job.total_choices * (1 + sampling.logprobs) > _MAX_TOLD:
        raise _refused("logprobs", f"more than {_MAX_TOLD} for each position of all choices.")
    if sampling.prompt_logprobs is not None:
        num_told = _num_prompt_chars(job) * job.num_choices * (1 + sampling.prompt_logprobs)
        if num_told > _MAX_SCORED:
            name = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
            raise _refused(name, f"more than {_MAX_SCORED} of all prompts together.")
    if served is not None:
        _check_vocabulary(job, served.vocab_size)


def _num_prompt_chars(job: GenerationJob) -> int:
    """No prompt has more tokens than characters, but for rare scripts."""
    return sum(map(_num_chars, job.prompts))


def _num_chars(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.token_ids)
        case ChatPrompt():
            return sum(len(message.content) for message in prompt.messages)


def _check_vocabulary(job: GenerationJob, vocab_size: int) -> None:
    sampling = job.sampling
    named = [
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        *(("prompt", p.token_ids) for p in job.prompts if isinstance(p, TokenPrompt)),
    ]
    for name, token_ids in named:
        if token_ids and (largest := max(token_ids)) >= vocab_size:
            raise _refused(name, f"token {largest} is not among the model's {vocab_size}.")


def _refused(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {reason}", param=param)


def _converted(job: dict[str, Any], request: GenerationBody) -> GenerationJob:
    try:
        return msgspec.convert(job, GenerationJob)
    except msgspec.ValidationError as error:
        raise _out_of_limits(*misfit(error), request) from None


def _out_of_limits(reason: str, place: str, request: GenerationBody) -> InvalidRequest:
    """Translate a place in the job to the client's names."""
    path = place.removeprefix(".")
    if path.startswith("sampling."):
        param = re.split(r"[.\[]", path)[1]
    elif path.startswith("prompts"):
        param = re.sub(r"^prompts(\[\d+\]\.)?", "", path)
        param = param if param.startswith(("messages", "tools")) else "prompt"
    else:
        param = {"num_choices": "n"}.get(path, path)
    param = _said_as(param, request)
    return InvalidRequest(f"{param}: {reason}", param=param)


def _said_as(param: str, request: GenerationBody) -> str:
    """The name under which the client said it."""
    name = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}.get(param, "")
    return name if getattr(request, name, None) is not None else param

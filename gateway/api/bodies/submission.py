"""Builds jobs from bodies, and checks everything that does not need the model."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import structs

from gateway.api.bodies.conversations import in_form
from gateway.api.bodies.grammars import after_reasoning
from gateway.api.bodies.messages import MessagesRequest
from gateway.api.bodies.parsing import refused
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from gateway.api.bodies.structured_output import (
    PARAMETERS,
    RequestedConstraint,
    check,
    check_now,
    translated,
    translated_now,
    wanted_constraint,
)
from gateway.api.bodies.tool_choice import ToolUse
from gateway.api.render.formats import ReceiptTerms, Rendering
from gateway.intake.keys.api_key import ApiKey
from gateway.log.cursor import LogFacts
from gateway.text.reasoning import CLOSED, THOUGHTS, Thought
from shared.errors import InvalidRequest
from shared.messages import (
    MAX_CHOICES,
    MAX_CONTEXT_BYTES,
    Announcement,
    ChatPrompt,
    GenerationJob,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from shared.off_loop import LARGE_BYTES, off_loop
from shared.telemetry import requests

_MAX_RETURNED_LOGPROBS = 1024
"""Maximum number of logprobs at each position, over all choices."""
_MAX_SCORED = 1 << 23
"""Maximum number of logprobs of all prompts."""
_MAX_DROPPED = 4
"""Maximum number of schemas of optional calls that are dropped because no worker can obey them. To
find each takes about a second."""
_MAX_ECHOED = 4 << 20
"""Maximum number of characters of the prompts that the choices of an answer repeat."""
_ECHOED_CHARS_PER_TOKEN = 16
"""A safe bound on the characters per token. Only a few tokens exceed it, such as long runs of
spaces."""

_PARAMS = {"constraint": "response_format"}
"""The names that clients use for sampling parameters, where they differ."""
GenerationBody: TypeAlias = ChatRequest | CompletionRequest | ResponsesRequest | MessagesRequest


class Submission(NamedTuple):
    """A job that is ready to be published, and the facts that the readers of its log need."""

    job: GenerationJob
    facts: LogFacts
    rendering: Rendering
    wanted: RequestedConstraint | None
    """The constraint to check before the job is published."""
    token_param: str
    """The parameter that limits the tokens of the answer."""

    def limited(self, caller: ApiKey) -> "Submission":
        """This submission with the limits of the caller's API key. If these are what limits its
        tokens, the context may end the answer earlier. Raises `InvalidRequest`."""
        sampling = self.job.sampling
        max_tokens = caller.limited_tokens(sampling.max_tokens, self.token_param)
        if max_tokens != sampling.max_tokens:
            sampling = structs.replace(sampling, max_tokens=max_tokens, clamp_max_tokens=True)
        job = structs.replace(
            self.job,
            sampling=sampling,
            key_id=caller.key_id,
            is_counted=caller.counts_jobs,
            max_total_tokens=caller.max_total_tokens,
        )
        return self._replace(job=job)

    async def check_constraint(self) -> "Submission":
        """Translate the constraint if it needs to be, check that workers can compile it, and drop
        the optional parts that they cannot. Raises `InvalidRequest` and `Overloaded`."""
        if self.wanted is None:
            return self
        wanted = await translated(self.wanted, self.job.tenant)
        submitted = self._constrained(wanted)
        try:
            await check(wanted, self.job.tenant)
        except InvalidRequest as error:
            # To write the constraint again takes as long as to build the job.
            dropping = partial(submitted._dropping_part, error)
            return await (await off_loop(dropping, LARGE_BYTES)).check_constraint()
        return submitted

    def continuing(self, token_ids: Sequence[int]) -> "Submission":
        """The same, but each choice begins with these tokens. Raises `InvalidRequest` if the
        request asks for the scores of its tokens."""
        sampling = self.job.sampling
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            raise refused("logprobs", "not for a fork, whose first tokens are not drawn.")
        return self._replace(job=structs.replace(self.job, given_ids=tuple(token_ids)))

    def with_receipt(self, request_sha256: str) -> "Submission":
        """The same, but its answer has a receipt. ``request_sha256`` is the hash of the request's
        body. Raises `InvalidRequest`."""
        job, facts = self.job, self.facts
        terms = ReceiptTerms(
            request_sha256=request_sha256,
            sampling=structs.replace(job.sampling, seed=None),
            seed=str(job.seed),
            created_at=_template_time(job),
            num_given_tokens=len(job.given_ids),
        )
        rendering = structs.replace(self.rendering, receipt=terms)
        facts, context = facts_of(
            rendering,
            tenant=facts.tenant,
            body_hash=facts.body_hash,
            is_detached=facts.is_detached,
            trace_id=facts.trace_id,
        )
        job = structs.replace(job, context=context, wants_provenance=True)
        return self._replace(job=job, facts=facts, rendering=rendering)

    def check_constraint_now(self) -> "Submission":
        """`check_constraint` for callers outside an event loop; it blocks."""
        if self.wanted is None:
            return self
        wanted = translated_now(self.wanted)
        submitted = self._constrained(wanted)
        try:
            check_now(wanted)
        except InvalidRequest as error:
            return submitted._dropping_part(error).check_constraint_now()
        return submitted

    def _constrained(self, wanted: RequestedConstraint | None) -> "Submission":
        """The same with another constraint."""
        constraint = None if wanted is None else wanted.constraint
        sampling = structs.replace(self.job.sampling, constraint=constraint)
        return self._replace(job=structs.replace(self.job, sampling=sampling), wanted=wanted)

    def _dropping_part(self, error: InvalidRequest) -> "Submission":
        if self.wanted is None or self.wanted.drop_part is None:
            raise error
        return self._constrained(self.wanted.drop_part(error.param or ""))


def submission(
    request: GenerationBody,
    *,
    request_id: str,
    created_at: float,
    template_time: float = 0.0,
    deadline: float | None = None,
    mode: Literal["stream", "final"] = "stream",
    served: Announcement | None = None,
    tenant: str = "",
    body_hash: str = "",
    is_stored: bool = False,
    echoed: bytes = b"{}",
    trace: Mapping[str, str] = MappingProxyType({}),
    is_detached: bool | None = None,
) -> Submission:
    """Build the job of a request. ``served`` is a worker's announcement of the model, if there is a
    worker; ``template_time`` is `ChatPrompt.now`; ``is_stored``: whether the response is stored;
    ``echoed`` are the fields of the request that it repeats, as JSON; ``is_detached`` takes
    precedence over the request's ``detach``.

    Raises `InvalidRequest`, which names the invalid parameter, and `Unavailable`.
    """
    if not request.model:
        raise refused("model", "expected the name of a model.")
    calls = request.tool_use(served)
    prompts = request.prompts(() if calls is None else calls.tools)
    parser = _reasoning_parser(request, prompts, served)
    wanted = _requested_constraint(request, calls, parser)
    sampling = _sampling(request, wanted, calls, parser)
    if served is not None:
        prompts = tuple(in_form(prompt, served.tool_parser) for prompt in prompts)
    if template_time:
        prompts = tuple(_dated(prompt, template_time) for prompt in prompts)
    rendering = _rendering(
        request,
        prompts,
        calls,
        parser,
        served,
        request_id=request_id,
        created=int(created_at),
        is_stored=is_stored,
        echoed=echoed,
    )
    is_detached = request.detach if is_detached is None else is_detached
    facts, context = facts_of(
        rendering,
        tenant=tenant,
        body_hash=body_hash,
        is_detached=is_detached,
        trace_id=requests.trace_id_of(trace) or "",
    )
    job = GenerationJob(
        request_id=request_id,
        tenant=tenant,
        model=request.model,
        prompts=prompts,
        num_choices=request.best_of or request.n,
        sampling=sampling,
        mode=mode,
        created_at=created_at,
        deadline=deadline,
        is_detached=is_detached,
        each_token=request.each_token,
        wants_prompt_text=request.echo,
        context=context,
        trace=dict(trace),
    )
    _check_sizes(request, job, served)
    return Submission(job, facts, rendering, wanted, _token_param(request))


def _token_param(request: GenerationBody) -> str:
    match request:
        case ChatRequest(max_completion_tokens=int()):
            return "max_completion_tokens"
        case ResponsesRequest(max_output_tokens=int()):
            return "max_output_tokens"
        case _:
            return "max_tokens"


def _template_time(job: GenerationJob) -> float:
    """The time that the chat templates of a job print."""
    chats = (prompt for prompt in job.prompts if isinstance(prompt, ChatPrompt))
    return next((chat.now for chat in chats if chat.now), job.created_at)


def _dated(prompt: Prompt, template_time: float) -> Prompt:
    if not isinstance(prompt, ChatPrompt):
        return prompt
    return structs.replace(prompt, now=template_time)


def facts_of(
    rendering: Rendering, *, tenant: str, body_hash: str, is_detached: bool, trace_id: str = ""
) -> tuple[LogFacts, bytes]:
    """The facts of a request that its log carries, and their encoding. Raises `InvalidRequest` if
    they are too long."""
    facts = LogFacts(
        tenant=tenant,
        body_hash=body_hash,
        num_choices=rendering.total_drawn,
        is_detached=is_detached,
        trace_id=trace_id,
        rendering=rendering.encode(),
    )
    context = facts.encode()
    if len(context) > MAX_CONTEXT_BYTES:
        repeated = msgspec.json.decode(rendering.echoed, type=dict[str, msgspec.Raw])
        # Apart from repeated fields, only the names of tools and of their parameters are long.
        param = max(repeated, key=lambda name: len(repeated[name]), default="tools")
        raise InvalidRequest(
            f"{param}: the part of the request that its response needs is longer than "
            f"{MAX_CONTEXT_BYTES} bytes.",
            param=param,
        )
    return facts, context


def _requested_constraint(
    request: GenerationBody, calls: ToolUse | None, parser: str | None
) -> RequestedConstraint | None:
    fields = {name: getattr(request, name) for name in PARAMETERS}
    wanted = wanted_constraint(fields) if any(fields.values()) else None
    if calls is not None and calls.is_required:
        return RequestedConstraint("tools", calls.constraint(parser), calls.schemas())
    if wanted is None:
        return None if calls is None else _constraint_after_tag(calls, parser)
    if wanted.with_lark is None:
        return _combined(wanted, calls, parser)
    of = wanted.of
    return wanted._replace(with_lark=lambda lark: _combined(of(lark), calls, parser))


def _combined(
    wanted: RequestedConstraint, calls: ToolUse | None, parser: str | None
) -> RequestedConstraint:
    """The constraint of an answer, beside optional calls and after a thought. Raises
    `InvalidRequest`."""
    if calls is not None:
        constraint = calls.constraint(parser, wanted.constraint)
        return RequestedConstraint("tools", constraint, (wanted, *calls.schemas()))
    return RequestedConstraint(wanted.param, after_reasoning(wanted.constraint, parser), (wanted,))


def _constraint_after_tag(
    calls: ToolUse, parser: str | None, max_dropped: int = _MAX_DROPPED
) -> RequestedConstraint | None:
    bound = calls.constraint_after_tag(parser)
    if bound is None:
        return None

    def drop_part(path: str) -> RequestedConstraint | None:
        if path not in calls.callable or not max_dropped:
            return None
        return _constraint_after_tag(calls.with_any_arguments(path), parser, max_dropped - 1)

    parts: tuple[RequestedConstraint, ...] = ()
    with suppress(InvalidRequest):  # a schema may be too long with its descriptions
        parts = calls.schemas()
    return RequestedConstraint("tools", bound, parts, drop_part)


def _reasoning_parser(
    request: GenerationBody, prompts: Sequence[Prompt], served: Announcement | None
) -> str | None:
    if served is None or request.endpoint == "completions":
        return None
    parser = served.reasoning_parser
    chats = [prompt for prompt in prompts if isinstance(prompt, ChatPrompt)]
    for switch in served.reasoning_switches:
        if any(chat.template_kwargs.get(switch.variable) is switch.value for chat in chats):
            parser = switch.parser
    if parser is None or parser not in THOUGHTS:
        return None
    is_open = all(_may_end_in_thought(chat, THOUGHTS[parser]) for chat in chats)
    return parser if is_open else CLOSED.get(parser, parser)


def _may_end_in_thought(chat: ChatPrompt, thought: Thought) -> bool:
    """Whether a thought may be open at the end of the prompt: the template may begin an answer with
    a thought, or the client may have left its own thought open."""
    if not chat.continue_final_message:
        return chat.add_generation_prompt
    begun = chat.messages[-1].content
    return begun.rfind(thought.opening) > begun.rfind(thought.closing)


def _sampling(
    request: GenerationBody,
    wanted: RequestedConstraint | None,
    calls: ToolUse | None,
    reasoning_parser: str | None,
) -> SamplingParams:
    logprobs, prompt_logprobs = request.num_logprobs(), request.prompt_logprobs
    if request.echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    if request.best_of > request.n:
        logprobs = logprobs or 0
    has_tags = calls is not None and calls.form.has_special_tokens
    has_tags |= reasoning_parser is not None and THOUGHTS[reasoning_parser].are_special
    return SamplingParams(
        max_tokens=request.token_limit(),
        clamp_max_tokens=request.clamps_max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        seed=request.seed,
        stop=request.stop_strings,
        ignore_eos=request.ignore_eos,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids,
        bad_words=request.bad_words,
        allowed_token_ids=request.allowed_token_ids,
        constraint=None if wanted is None else wanted.constraint,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        include_stop_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens and not has_tags,
    )


def _rendering(
    request: GenerationBody,
    prompts: tuple[Prompt, ...],
    calls: ToolUse | None,
    parser: str | None,
    served: Announcement | None,
    *,
    request_id: str,
    created: int,
    is_stored: bool,
    echoed: bytes,
) -> Rendering:
    num_drawn = request.best_of or request.n
    return Rendering(
        endpoint=request.endpoint,
        request_id=request_id,
        model=request.model,
        created=created,
        num_prompts=len(prompts),
        num_choices=request.n,
        max_tokens=request.token_limit() if request.clamps_max_tokens else None,
        best_of=num_drawn if num_drawn > request.n else 0,
        is_stream=request.stream,
        include_usage=request.include_usage,
        continuous_usage=request.continuous_usage,
        is_obfuscated=request.include_obfuscation,
        echo=request.echo,
        logprobs=request.num_logprobs(),
        prompt_logprobs=request.prompt_logprobs,
        tokens_as_ids=request.return_tokens_as_token_ids,
        hides_stop=bool(request.stop_strings) and not request.include_stop_str_in_output,
        tool_parser=calls.parser if calls else None,
        tool_names=tuple(tool.name for tool in calls.callable.values()) if calls else None,
        text_parameters=calls.text_parameters() if calls else None,
        custom_tools=calls.custom if calls else (),
        num_earlier_calls=_num_calls(prompts) if calls and calls.form.numbered_id else 0,
        has_functions=isinstance(request, ChatRequest) and request.has_functions,
        is_forced=calls is not None and calls.is_required,
        is_single_call=calls is not None and calls.is_single,
        reasoning_parser=parser,
        include_reasoning=request.include_reasoning,
        fingerprint=served.fingerprint if served else None,
        service_tier=request.tier,
        is_stored=is_stored,
        echoed=echoed,
    )


def _num_calls(prompts: Iterable[Prompt]) -> int:
    chats = (prompt for prompt in prompts if isinstance(prompt, ChatPrompt))
    return sum(len(message.tool_calls) for chat in chats for message in chat.messages)


def _check_sizes(request: GenerationBody, job: GenerationJob, served: Announcement | None) -> None:
    """Check limits on products of parameters, and parameters that contradict each other. Raises
    `InvalidRequest`."""
    sampling = job.sampling
    if job.num_choices < request.n:
        raise refused("best_of", "less than n.")
    if job.num_choices > request.n and request.stream:
        raise refused("best_of", "not with stream, unless it is n.")
    if len(job.prompts) * job.num_choices > MAX_CHOICES:
        raise refused("n", f"more than {MAX_CHOICES} choices for all prompts together.")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise refused("min_tokens", "must not exceed max_tokens.")
    if request.prompt_logprobs is not None and request.stream:
        raise refused("prompt_logprobs", "not with stream.")
    _check_returned(request, job)
    if served is not None:
        _check_vocabulary(job, served.vocab_size)
        for name in sampling.used(served.unsupported):
            raise refused(_PARAMS.get(name, name), f"not with the model's engine, {served.engine}.")


def _check_returned(request: GenerationBody, job: GenerationJob) -> None:
    """Check how much an answer says besides its tokens. Raises `InvalidRequest`."""
    sampling = job.sampling
    if (
        sampling.logprobs is not None
        and job.total_choices * (1 + sampling.logprobs) > _MAX_RETURNED_LOGPROBS
    ):
        raise refused(
            "logprobs", f"more than {_MAX_RETURNED_LOGPROBS} for each position of all choices."
        )
    if request.echo and _num_echoed_chars(job) * request.n > _MAX_ECHOED:
        raise refused("echo", f"more than {_MAX_ECHOED} characters in all choices together.")
    if sampling.prompt_logprobs is not None:
        num_returned = _num_prompt_chars(job) * job.num_choices * (1 + sampling.prompt_logprobs)
        if num_returned > _MAX_SCORED:
            name = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
            raise refused(name, f"more than {_MAX_SCORED} of all prompts together.")


def _num_prompt_chars(job: GenerationJob) -> int:
    """An upper bound on the tokens of all prompts: except in rare scripts, each token has a
    character or more."""
    return sum(map(_num_chars, job.prompts))


def _num_echoed_chars(job: GenerationJob) -> int:
    """An estimate of the characters of all prompts, if the worker has to detokenize them."""
    return sum(
        _num_chars(prompt) * (_ECHOED_CHARS_PER_TOKEN if isinstance(prompt, TokenPrompt) else 1)
        for prompt in job.prompts
    )


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
            raise refused(name, f"token {largest} is not among the model's {vocab_size}.")

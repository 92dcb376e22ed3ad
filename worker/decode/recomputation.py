"""Recomputes an answer and compares it, token by token, with the answer that a receipt states."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from shared.log import LogWriter
from shared.messages import (
    Finished,
    GenerationJob,
    PromptFacts,
    Receipt,
    ReceiptChoice,
    TokenDelta,
    hash_text,
    prompt_facts,
)
from worker.decode.choices import ChoicePlan, Choices, ChoiceWriter, plan
from worker.decode.served_model import ServedModel
from worker.engine.interface import StepOutput, Submit
from worker.engine.redraw import Redrawing

NUM_ALTERNATIVES = 20
"""The most likely tokens among which a token that differs is looked up, on a runner that is not
exact."""
_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that differs from the token that this model draws."""

    choice: int
    position: int
    stated: int
    drawn: int
    gap: float | None
    """The drawn token's logprob minus the stated token's; None if it is not known."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a recomputation."""

    num_tokens: int
    """The tokens that were compared."""
    differences: Sequence[Difference]
    problem: str = ""
    """What else is wrong; empty if nothing is."""


async def recompute(
    job: GenerationJob, receipt: Receipt, model: ServedModel, *, is_exact: bool
) -> Comparison:
    """Compare a receipt with what ``model`` computes for ``job``, whose sampling parameters and
    seed equal the receipt's. The model must not serve.

    ``is_exact``: the model is (`ServedModel.is_exact`) and has the numerics of the receipt, so that
    the first difference is proof, and ends the search. Raises `InvalidRequest` and
    `ContextLengthExceeded` for a job that the model would refuse.
    """
    sampling = job.sampling
    if not is_exact and sampling.logprobs is None:
        sampling = structs.replace(sampling, logprobs=NUM_ALTERNATIVES)
    job = structs.replace(job, sampling=structs.replace(sampling, prompt_logprobs=None))
    plans = await plan(job, model)
    provenance = receipt.executions[-1].provenance
    stated = () if provenance is None else provenance.prompts
    if problem := _problem_with_prompts(job, plans, stated):
        return Comparison(0, (), problem)
    plans = [
        replace(own, max_tokens=facts.max_tokens) for own, facts in zip(plans, stated, strict=True)
    ]
    log = LogWriter(1, job.total_choices)
    submits = Choices(job, plans, model, log).submits("interactive")
    assert model.runner is not None, "the model is not in this process"
    redrawing = Redrawing(model.runner, _STEP_TOKENS)
    num_tokens, differences = 0, list[Difference]()
    for choice, (submit, facts) in enumerate(zip(submits, receipt.choices, strict=True)):
        num_given = receipt.num_given_tokens
        outputs, found = _redrawn(redrawing, submit, facts, num_given, is_exact=is_exact)
        num_tokens += len(outputs)
        differences += found
        if found and is_exact:
            break
        if not found and (problem := _problem_with_end(choice, facts, outputs, submit, model)):
            return Comparison(num_tokens, differences, problem)
    return Comparison(num_tokens, differences)


def _problem_with_prompts(
    job: GenerationJob, plans: Sequence[ChoicePlan], stated: Sequence[PromptFacts]
) -> str:
    if not stated:
        return "the worker did not state what it computed from"
    if len(stated) != len(plans):
        return f"the receipt has {len(stated)} prompts, and the request {len(plans)}"
    for number, (own, facts) in enumerate(zip(plans, stated, strict=True)):
        if prompt_facts(own.prompt_ids, facts.max_tokens) != facts:
            return f"the tokens of prompt {number} are not those of the receipt"
        limit = job.sampling.max_tokens
        may_be_less = limit is None or job.sampling.clamp_max_tokens
        if limit is not None and (
            facts.max_tokens > limit or (facts.max_tokens < limit and not may_be_less)
        ):
            return (
                f"the receipt limits answers to {facts.max_tokens} tokens, the request to {limit}"
            )
    return ""


def _redrawn(
    redrawing: Redrawing, submit: Submit, facts: ReceiptChoice, num_given: int, *, is_exact: bool
) -> tuple[list[StepOutput], list[Difference]]:
    outputs: list[StepOutput] = []
    differences: list[Difference] = []
    stated_ids = facts.token_ids
    for position, output in enumerate(redrawing.draw(submit, stated_ids)):
        stated = stated_ids[position]
        if position < num_given:  # another answer gave it
            output = structs.replace(output, token_id=stated)
        outputs.append(output)
        if output.token_id == stated:
            continue
        choice = submit.sequence_id.choice
        gap = _gap(output, stated)
        differences.append(Difference(choice, position, stated, output.token_id, gap))
        if is_exact:
            break
    return outputs, differences


def _gap(output: StepOutput, stated: int) -> float | None:
    score = output.score
    if score is None or stated not in score.top_ids:
        return None
    return score.logprob - score.top_logprobs[list(score.top_ids).index(stated)]


def _problem_with_end(
    choice: int,
    facts: ReceiptChoice,
    outputs: Sequence[StepOutput],
    submit: Submit,
    model: ServedModel,
) -> str:
    """The error in the end or the text of a choice whose tokens are right; empty without an
    error."""
    if len(outputs) < len(facts.token_ids):
        return f"choice {choice}: no token can follow token {len(outputs)}"
    writer = ChoiceWriter(
        0,
        LogWriter(1, 1),
        model.tokenizer,
        structs.replace(submit.sampling, logprobs=None),
        max_tokens=submit.max_tokens,
        eos_ids=submit.eos_ids,
    )
    events: list[TokenDelta | Finished] = list(writer.close())
    for output in outputs:
        if writer.is_finished:
            return f"choice {choice} goes on after its end, at token {_num_tokens(events)}"
        event = writer.advance([structs.replace(output, score=None)])
        if event is not None:
            events.append(event)
    if not isinstance(end := events[-1] if events else None, Finished):
        return f"choice {choice} ends early, after {len(outputs)} tokens"
    if (end.finish_reason, end.stop_reason) != (facts.finish_reason, facts.stop_reason):
        return f"choice {choice} ends for another reason: {end.finish_reason}"
    if hash_text([event.text for event in events]) != facts.text_sha256:
        return f"choice {choice}: its tokens make another text"
    return ""


def _num_tokens(events: Iterable[TokenDelta | Finished]) -> int:
    return sum(len(event.token_ids) for event in events)

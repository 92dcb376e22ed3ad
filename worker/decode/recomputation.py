"""Recomputes an answer and compares it, token by token, with the answer that a receipt states."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

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
from worker.engine.interface import Judgement, StepOutput, Submit
from worker.engine.redraw import Redrawing, Redrawn

_STEP_TOKENS = 512
Standard: TypeAlias = Literal["exact", "margins", "likelihood"]
"""What can be said of a token that differs from the token that a model draws. ``exact``: it is
proof. ``margins``: it is evidence, and the token's margin says how strong. ``likelihood``: nothing,
because the token was drawn with another random number."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that differs from the token that this model draws."""

    choice: int
    position: int
    stated: int
    drawn: int
    margin: float | None
    """`Judgement.margin` of the stated token; None if the difference is proof."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a recomputation."""

    num_tokens: int
    """The tokens that were compared."""
    differences: Sequence[Difference]
    problem: str = ""
    """What else is wrong; empty if nothing is."""
    judgements: Sequence[Judgement] = ()
    """Of all tokens that were compared, unless the standard is ``exact``."""


async def recompute(
    job: GenerationJob, receipt: Receipt, model: ServedModel, standard: Standard
) -> Comparison:
    """Compare a receipt with what ``model`` computes for ``job``, whose sampling parameters and
    seed equal the receipt's. The model must not serve.

    ``standard`` may be ``exact`` if the model is (`ServedModel.is_exact`) and has the numerics of
    the receipt: then the first difference ends the search. Raises `InvalidRequest` and
    `ContextLengthExceeded` for a job that the model would refuse.
    """
    sampling = structs.replace(job.sampling, logprobs=None, prompt_logprobs=None)
    job = structs.replace(job, sampling=sampling)
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
    found = _Findings(standard)
    for submit, facts in zip(submits, receipt.choices, strict=True):
        draws = redrawing.draw(submit, facts.token_ids, is_judged=standard != "exact")
        outputs = found.read(submit, facts, receipt.num_given_tokens, draws)
        if found.is_decided:
            break
        if problem := _problem_with_end(submit, facts, outputs, model):
            return found.comparison(problem)
    return found.comparison()


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


@dataclass(slots=True)
class _Findings:
    """What the draws of all choices show by a standard."""

    standard: Standard
    num_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)

    @property
    def is_decided(self) -> bool:
        """Whether a difference is proof."""
        return self.standard == "exact" and bool(self.differences)

    def read(
        self, submit: Submit, facts: ReceiptChoice, num_given: int, draws: Iterator[Redrawn]
    ) -> list[StepOutput]:
        """Compare the draws of a choice, of which another answer gave the first ``num_given``
        tokens. Returns the outputs with the stated tokens, up to a proof."""
        outputs: list[StepOutput] = []
        for position, (stated, draw) in enumerate(zip(facts.token_ids, draws, strict=False)):
            if position >= num_given:
                self._compare(submit.sequence_id.choice, position, stated, draw)
            if self.is_decided:
                break
            outputs.append(structs.replace(draw.output, token_id=stated))
        return outputs

    def comparison(self, problem: str = "") -> Comparison:
        return Comparison(self.num_tokens, self.differences, problem, self.judgements)

    def _compare(self, choice: int, position: int, stated: int, draw: Redrawn) -> None:
        self.num_tokens += 1
        judgement, drawn = draw.judgement, draw.output.token_id
        if judgement is not None:
            self.judgements.append(judgement)
        if drawn != stated and self.standard != "likelihood":
            margin = None if judgement is None else judgement.margin
            self.differences.append(Difference(choice, position, stated, drawn, margin))


def _problem_with_end(
    submit: Submit, facts: ReceiptChoice, outputs: Sequence[StepOutput], model: ServedModel
) -> str:
    """The error in the end or the text that the tokens of a choice make; empty without an error."""
    choice = submit.sequence_id.choice
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

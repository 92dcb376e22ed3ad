"""Computes the answer of a receipt again, on this machine."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from msgspec import structs

from gateway.api.bodies.messages import MessagesRequest
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from gateway.api.bodies.submission import GenerationBody, Submission, submission
from gateway.api.routes.generation import ParsedRequest
from shared import settings
from shared.errors import StartupError
from shared.messages import Announcement, GenerationJob, Receipt, ReceiptRun, SamplingParams
from shared.settings import WorkerSettings
from worker.decode import served_model
from worker.decode.recomputation import Comparison, Difference, Standard, recompute
from worker.decode.served_model import ServedModel
from worker.engine.interface import Judgement
from worker.engines.start_up import engine_of
from worker.model.numerics import kernels_of, kv_dtype_of

_BODIES: Mapping[str, type[GenerationBody]] = {
    kind.endpoint: kind
    for kind in (ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest)
}
_DECIDED_ELSEWHERE = frozenset({"max_tokens", "clamp_max_tokens", "constraint"})
"""Sampling parameters that an API key limits, or that depend on the gateway's version."""


class Recomputed(NamedTuple):
    """What the recomputation found."""

    num_tokens: int
    differences: Sequence[str]
    problem: str
    standard: Standard
    why_not_exact: str
    evidence: Sequence[str] = ()
    """How far the model is from giving the tokens, unless the standard is ``exact``."""


class Recomputation:
    """The recomputation of a receipt's answer to the request ``body``, with a model that serves
    nobody else."""

    def __init__(self, receipt: Receipt, body: bytes, model: ServedModel) -> None:
        """Raises `StartupError`, and `RequestError` for a body that no gateway accepts."""
        self._receipt = receipt
        self._model = model
        self._submitted = self._submission(body)

    def problem(self) -> str:
        """Why the answer cannot be that of this model and this request; empty if it can."""
        receipt, model = self._receipt, self._model
        for execution in receipt.executions:
            if problem := _problem_with_model(execution, model):
                return problem
        job = self._submitted.job
        # The seed of a greedy job has no effect, and equal jobs share that of their execution.
        is_seeded = job.sampling.seed is not None or not job.sampling.is_greedy
        if is_seeded and str(job.seed) != receipt.seed:
            return f"the seed is {receipt.seed}, and the request's is {job.seed}"
        if len(receipt.choices) != job.total_choices:
            return (
                f"the receipt has {len(receipt.choices)} choices, the request {job.total_choices}"
            )
        if changed := _changed(job.sampling, receipt.sampling):
            return f"the receipt has other sampling parameters than the request: {changed}"
        return ""

    async def compare(self) -> Recomputed:
        """Compute the answer again, and compare all its tokens."""
        sampling = structs.replace(self._receipt.sampling, seed=int(self._receipt.seed))
        job: GenerationJob = structs.replace(self._submitted.job, sampling=sampling)
        found = await recompute(job, self._receipt, self._model, self._standard)
        return Recomputed(
            found.num_tokens,
            [self._described(one) for one in found.differences],
            found.problem,
            self._standard,
            self._why_not_exact,
            _evidence(found, self._standard),
        )

    @property
    def _numerics(self) -> set[str]:
        return {execution.numerics for execution in self._receipt.executions}

    @property
    def _standard(self) -> Standard:
        if self._numerics == {self._model.numerics}:
            return "exact" if self._model.is_exact else "margins"
        is_drawn_elsewhere = any(map(engine_of, self._numerics))
        is_greedy = self._receipt.sampling.is_greedy
        return "likelihood" if is_drawn_elsewhere and not is_greedy else "margins"

    @property
    def _why_not_exact(self) -> str:
        here = self._model.numerics
        if self._numerics == {here}:
            return f"the numerics here are {here!r}, which are not exact"
        return f"the numerics are {', '.join(sorted(self._numerics))}, and here {here}"

    def _described(self, one: Difference) -> str:
        decode = self._model.tokenizer.decode
        margin = "" if one.margin is None else f", by a margin of {one.margin:.2g}"
        return (
            f"choice {one.choice} differs at token {one.position}: the receipt has {one.stated} "
            f"({decode([one.stated])!r}), and this model draws {one.drawn} "
            f"({decode([one.drawn])!r}){margin}"
        )

    def _submission(self, body: bytes) -> Submission:
        receipt, model = self._receipt, self._model
        kind = _BODIES.get(receipt.endpoint)
        if kind is None:
            raise StartupError(f"the endpoint {receipt.endpoint!r} is not known here")
        request = ParsedRequest.of(kind, body).body
        served = Announcement(
            worker="verify",
            model=receipt.model,
            vocab_size=model.tokenizer.vocab_size,
            max_seq_len=model.max_seq_len,
            fingerprint=model.fingerprint,
            numerics=model.numerics,
            max_num_seqs=1,
            tool_parser=model.tool_parser,
            reasoning_parser=model.reasoning_parser,
            reasoning_switches=model.reasoning_switches,
        )
        return submission(
            structs.replace(request, model=receipt.model),
            request_id=receipt.id,
            created_at=receipt.created_at,
            served=served,
        )


def load(model: str, receipt: Receipt) -> ServedModel:
    """The model with the weight format and data type of a receipt, for one sequence. Raises
    `StartupError`."""
    stated = receipt.executions[-1].provenance if receipt.executions else None
    if stated is None:
        raise StartupError("the worker of this answer did not state what it computed from")
    numerics = receipt.executions[-1].numerics
    loaded = settings.load(
        WorkerSettings,
        model=model,
        weight_format=stated.weight_format,
        dtype=stated.dtype or None,
        kv_dtype=kv_dtype_of(numerics),
        kernels=kernels_of(numerics),
        max_num_seqs=1,
    )
    return served_model.load(loaded)


def _problem_with_model(execution: ReceiptRun, model: ServedModel) -> str:
    """Why an execution cannot have been one of ``model``; empty if it can. An engine over HTTP
    does not state its weights, and its fingerprint has only the name of its model."""
    stated = execution.provenance
    if stated is None:
        return ""
    if not engine_of(execution.numerics):
        if stated.fingerprint == model.fingerprint:
            return ""
        return (
            f"the answer is of the model {stated.fingerprint}, and this one is {model.fingerprint}"
        )
    if stated.tokenizer in ("", model.tokenizer_sha256):  # older workers do not state it
        return ""
    return (
        f"the answer is of a model with the tokenizer {stated.tokenizer}, and this one has "
        f"{model.tokenizer_sha256}"
    )


def _evidence(found: Comparison, standard: Standard) -> Sequence[str]:
    match standard:
        case "exact":
            return ()
        case "margins":
            return _margins([one.margin for one in found.differences if one.margin is not None])
        case "likelihood":
            return _likelihood(found.judgements)


def _margins(margins: Sequence[float]) -> Sequence[str]:
    if not margins:
        return ()
    return [f"margins of the tokens that differ: {_median(margins)}, maximum {max(margins):.2g}"]


def _likelihood(judgements: Sequence[Judgement]) -> Sequence[str]:
    if not judgements:
        return ()
    logprobs = [one.logprob for one in judgements]
    ranks = [one.rank for one in judgements]
    num_left_out = sum(not one.is_kept for one in judgements)
    return [
        f"log probabilities of the tokens: {_median(logprobs)}, minimum {min(logprobs):.3g}",
        f"ranks of the tokens: {_median(ranks)}, maximum {max(ranks)}",
        f"tokens that this model cannot draw: {num_left_out}",
    ]


def _median(values: Sequence[float]) -> str:
    return f"median {median(values):.2g}"


def _changed(wanted: SamplingParams, stated: SamplingParams) -> str:
    """The names of the parameters that differ."""
    differing = [
        name
        for name in SamplingParams.__struct_fields__
        if name not in ("seed", *_DECIDED_ELSEWHERE)
        and getattr(wanted, name) != getattr(stated, name)
    ]
    if (wanted.constraint is None) != (stated.constraint is None):
        differing.append("constraint")
    return ", ".join(differing)

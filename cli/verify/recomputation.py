"""Computes the answer of a receipt again, on this machine."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from gateway.api.bodies.messages import MessagesRequest
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from gateway.api.bodies.submission import GenerationBody, Submission, submission
from gateway.api.routes.generation import ParsedRequest
from shared import settings
from shared.errors import StartupError
from shared.messages import Announcement, GenerationJob, Receipt, SamplingParams
from shared.settings import WorkerSettings
from worker.decode import served_model
from worker.decode.recomputation import Comparison, Difference, recompute
from worker.decode.served_model import ServedModel
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
    is_exact: bool
    why_not_exact: str


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
            stated = execution.provenance
            if stated is not None and stated.fingerprint != model.fingerprint:
                return (
                    f"the answer is of the model {stated.fingerprint}, and this one is "
                    f"{model.fingerprint}"
                )
        job = self._submitted.job
        if str(job.seed) != receipt.seed:
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
        numerics = {execution.numerics for execution in self._receipt.executions}
        is_same = numerics == {self._model.numerics}
        is_exact = is_same and self._model.is_exact
        found = await recompute(job, self._receipt, self._model, is_exact=is_exact)
        why = (
            f"the numerics here are {self._model.numerics!r}, which are not exact"
            if is_same
            else f"the numerics are {', '.join(sorted(numerics))}, and here {self._model.numerics}"
        )
        return self._recomputed(found, why, is_exact=is_exact)

    def _recomputed(self, found: Comparison, why: str, *, is_exact: bool) -> Recomputed:
        differences = [self._described(one) for one in found.differences]
        return Recomputed(found.num_tokens, differences, found.problem, is_exact, why)

    def _described(self, one: Difference) -> str:
        decode = self._model.tokenizer.decode
        gap = "" if one.gap is None else f", which is more likely by {one.gap:.3f} in log"
        return (
            f"choice {one.choice} differs at token {one.position}: the receipt has {one.stated} "
            f"({decode([one.stated])!r}), and this model draws {one.drawn} "
            f"({decode([one.drawn])!r}){gap}"
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

"""The bodies and answers of the endpoints that compare texts, as vLLM serves them for embedding
models: a score is the cosine of two embeddings."""

from collections.abc import Sequence
from functools import partial
from operator import mul
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from gateway.api.bodies.parsing import refused
from gateway.api.bodies.quick import QuickBody, QuickDraft, num_vector_bytes
from gateway.fleet.quick import QuickLane
from shared.messages import (
    MAX_EMBEDDING_INPUTS,
    Embedded,
    EmbeddingJob,
    QuickJob,
    TextPrompt,
)
from shared.messages.fields import Text
from shared.off_loop import off_loop

Texts: TypeAlias = (
    Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_EMBEDDING_INPUTS - 1)]
)


class DocumentText(Struct, frozen=True, kw_only=True):
    text: Text


Documents: TypeAlias = Annotated[
    list[Text | DocumentText], Meta(min_length=1, max_length=MAX_EMBEDDING_INPUTS - 1)
]


class ScoringUsage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt_tokens: int
    total_tokens: int


class Score(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="object", tag="score"
):
    index: int
    score: float


class Scores(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="object", tag="list"
):
    id: str
    model: str
    data: Sequence[Score]
    usage: ScoringUsage


class Ranked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    index: int
    """The position of the document in the request."""
    relevance_score: float
    document: DocumentText | None = None


class Ranking(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    model: str
    results: Sequence[Ranked]
    """The most relevant first."""
    usage: ScoringUsage


class ScoreRequest(QuickBody, frozen=True, kw_only=True):
    """Two texts, a text and several others, or as many texts as others."""

    text_1: Texts
    text_2: Texts

    def job(self, draft: QuickDraft) -> EmbeddingJob:
        """Raises `InvalidRequest`."""
        first, second = _listed(self.text_1), _listed(self.text_2)
        if len(first) not in (1, len(second)):
            raise refused("text_1", "expected one text, or as many as text_2.")
        return _embedding([*first, *second], "text_2", draft)

    async def answer(self, lane: QuickLane, job: QuickJob) -> Scores:
        embedded = await lane.ask(job, Embedded)
        scores = await off_loop(partial(self._scores, embedded), num_vector_bytes(embedded))
        return Scores(id=job.request_id, model=job.model, data=scores, usage=_usage(embedded))

    def _scores(self, embedded: Embedded) -> list[Score]:
        num_first = len(_listed(self.text_1))
        first, second = embedded.vectors[:num_first], embedded.vectors[num_first:]
        if num_first == 1:
            first *= len(second)
        pairs = enumerate(zip(first, second, strict=True))
        return [Score(index=k, score=_cosine(*pair)) for k, pair in pairs]


class RerankRequest(QuickBody, frozen=True, kw_only=True):
    """A query, and the documents to sort by their relevance for it."""

    query: Text
    documents: Documents
    top_n: Annotated[int, Meta(ge=0, description="0: all documents.")] = 0
    return_documents: bool = True

    def job(self, draft: QuickDraft) -> EmbeddingJob:
        """Raises `InvalidRequest`."""
        return _embedding([self.query, *self._texts()], "documents", draft)

    async def answer(self, lane: QuickLane, job: QuickJob) -> Ranking:
        embedded = await lane.ask(job, Embedded)
        results = await off_loop(partial(self._ranked, embedded), num_vector_bytes(embedded))
        return Ranking(id=job.request_id, model=job.model, results=results, usage=_usage(embedded))

    def _ranked(self, embedded: Embedded) -> list[Ranked]:
        query, *documents = embedded.vectors
        scores = [_cosine(query, document) for document in documents]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        texts = self._texts()
        return [
            Ranked(
                index=index,
                relevance_score=scores[index],
                document=DocumentText(text=texts[index]) if self.return_documents else None,
            )
            for index in order[: self.top_n or None]
        ]

    def _texts(self) -> list[str]:
        return [item if isinstance(item, str) else item.text for item in self.documents]


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _embedding(texts: Sequence[str], param: str, draft: QuickDraft) -> EmbeddingJob:
    if len(texts) > MAX_EMBEDDING_INPUTS:
        raise refused(param, f"more than {MAX_EMBEDDING_INPUTS} texts together.")
    return EmbeddingJob(
        **draft.fields(),
        prompts=tuple(TextPrompt(text=text) for text in texts),
    )


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine similarity of two vectors of length 1."""
    cosine: float = sum(map(mul, one, other))
    return cosine


def _usage(embedded: Embedded) -> ScoringUsage:
    num_tokens = sum(embedded.num_prompt_tokens)
    return ScoringUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)

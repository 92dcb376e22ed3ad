"""Scores of texts are computed from their vectors."""

import time
from typing import TypeVar

import pytest

from gateway.api.bodies.scoring import RerankRequest, ScoreRequest
from gateway.fleet.quick import QuickLane
from shared.messages import Embedded, EmbeddingJob, QuickJob, ReplyEvent

Answer = TypeVar("Answer", bound=ReplyEvent)

NUM_DOCUMENTS = 500
VECTOR = (1 / 64,) * 4096
MAX_LOOP_S = 0.02


class AnsweredLane(QuickLane):
    """A worker has answered every job with vectors of usual sizes."""

    def __init__(self) -> None:
        """No bus is needed."""

    async def ask(self, job: QuickJob, kind: type[Answer]) -> Answer:
        answer = Embedded(
            request_id=job.request_id,
            vectors=(VECTOR,) * (1 + NUM_DOCUMENTS),
            num_prompt_tokens=(1,) * (1 + NUM_DOCUMENTS),
        )
        assert isinstance(answer, kind)
        return answer


@pytest.mark.parametrize(
    "request_",
    [
        RerankRequest(model="m", query="q", documents=["d"] * NUM_DOCUMENTS),
        ScoreRequest(model="m", text_1="q", text_2=["d"] * NUM_DOCUMENTS),
    ],
    ids=["rerank", "score"],
)
async def test_many_vectors_are_compared_beside_the_event_loop(
    request_: RerankRequest | ScoreRequest,
) -> None:
    job = EmbeddingJob(request_id="r", model="m", prompts=())

    async def loop_s() -> float:
        began = time.thread_time()
        await request_.answer(AnsweredLane(), job)
        return time.thread_time() - began

    # The collection of the whole session's garbage takes longer.
    assert min([await loop_s() for _ in range(3)]) < MAX_LOOP_S

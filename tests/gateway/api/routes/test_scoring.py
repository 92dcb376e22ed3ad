"""POST /v1/score and /v1/rerank."""

from typing import Any

import pytest

from shared.messages import Embedded, EmbeddingJob, QuickAnswer, QuickJob, TextPrompt
from tests.support.gateway.http import LiveGateway
from tests.support.workers.scripted_worker import MODEL, ScriptedWorker

VECTORS = {"east": (1.0, 0.0), "north": (0.0, 1.0), "west": (-1.0, 0.0), "northeast": (0.6, 0.8)}


def embed(job: QuickJob) -> QuickAnswer:
    """Each text is a direction, and has a single token."""
    assert isinstance(job, EmbeddingJob)
    texts = [prompt.text for prompt in job.prompts if isinstance(prompt, TextPrompt)]
    return Embedded(
        request_id=job.request_id,
        vectors=tuple(VECTORS[text] for text in texts),
        num_prompt_tokens=(1,) * len(texts),
    )


@pytest.fixture(autouse=True)
def _embeds(worker: ScriptedWorker) -> None:
    worker.quick_script = embed


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_the_most_relevant_documents_come_first(gateway: LiveGateway, path: str) -> None:
    documents = ["west", {"text": "east"}, "northeast"]

    answer = await gateway.post(path, model=MODEL, query="east", documents=documents, top_n=2)

    assert answer.json()["results"] == [
        {"index": 1, "relevance_score": 1.0, "document": {"text": "east"}},
        {"index": 2, "relevance_score": 0.6, "document": {"text": "northeast"}},
    ]
    assert answer.json()["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


async def test_documents_may_be_left_out_of_a_ranking(gateway: LiveGateway) -> None:
    body = {"model": MODEL, "query": "east", "documents": ["west"], "return_documents": False}

    answer = (await gateway.post("/v1/rerank", **body)).json()

    assert answer["results"] == [{"index": 0, "relevance_score": -1.0, "document": None}]


@pytest.mark.parametrize(
    ("first", "second", "scores"),
    [
        ("east", "northeast", [0.6]),
        ("east", ["west", "northeast"], [-1.0, 0.6]),
        (["east", "north"], ["northeast", "northeast"], [0.6, 0.8]),
    ],
)
async def test_a_score_is_the_cosine_of_two_texts(
    gateway: LiveGateway, first: Any, second: Any, scores: list[float]
) -> None:
    answer = (await gateway.post("/v1/score", model=MODEL, text_1=first, text_2=second)).json()

    num_texts = sum(1 if isinstance(texts, str) else len(texts) for texts in (first, second))
    assert answer["usage"] == {"prompt_tokens": num_texts, "total_tokens": num_texts}
    assert [item["score"] for item in answer["data"]] == scores
    assert [item["index"] for item in answer["data"]] == list(range(len(scores)))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": ["east", "west"], "text_2": "north"}, "text_1"),
        ("/v1/score", {"text_1": ["east"] * 1100, "text_2": ["east"] * 1100}, "text_2"),
        ("/v1/rerank", {"query": "east", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "east", "documents": ["west"], "top_n": -1}, "top_n"),
    ],
)
async def test_what_cannot_be_compared_is_refused(
    gateway: LiveGateway, path: str, body: dict[str, Any], param: str
) -> None:
    response = await gateway.post(path, model=MODEL, **body)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)

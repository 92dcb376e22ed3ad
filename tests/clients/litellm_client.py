"""LiteLLM: a chat, its errors, and its helpers for files and batches."""

import json
import time
from typing import Any

import httpx
import litellm  # type: ignore[import-not-found]

from tests.clients.checks import (
    ANSWER,
    CAPITAL,
    LONG_STORY,
    batch_lines,
    equal,
    raised,
    run,
    target,
)

TARGET = target()
ACCESS: dict[str, Any] = {"api_base": f"{TARGET.url}/v1", "api_key": TARGET.api_key}
PROVIDER: dict[str, Any] = {**ACCESS, "custom_llm_provider": "openai"}


def started(content: bytes) -> Any:
    """The batch of a file that is uploaded for it."""
    file = litellm.create_file(file=("in.jsonl", content), purpose="batch", **PROVIDER)
    return litellm.create_batch(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"for": "a check"},
        **PROVIDER,
    )


def ended(batch: Any) -> Any:
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = litellm.retrieve_batch(batch_id=batch.id, **PROVIDER)
    return batch


def asked(**options: Any) -> Any:
    return litellm.completion(
        **ACCESS
        | {
            "model": f"openai/{TARGET.model}",
            "messages": [{"role": "user", "content": CAPITAL}],
            "temperature": 0,
            "max_retries": 0,
        }
        | options
    )


def check_chat() -> None:
    equal(asked().choices[0].message.content, ANSWER)


def check_chat_streamed() -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in asked(stream=True)]

    equal("".join(pieces), ANSWER)


def check_rerank_or_a_clear_refusal() -> None:
    embedder = f"{TARGET.model}-embedder"
    headers = {"authorization": f"Bearer {TARGET.api_key}"}
    served = httpx.get(f"{TARGET.url}/v1/models", headers=headers).json()["data"]
    documents = ["Bread is baked.", "Paris is the capital of France.", "Cats sleep."]

    def reranked(model: str) -> Any:
        return litellm.rerank(
            model=f"hosted_vllm/{model}", query=CAPITAL, documents=documents, top_n=2, **ACCESS
        )

    if embedder not in [model["id"] for model in served]:
        error = raised(litellm.BadRequestError, lambda: reranked(TARGET.model))
        assert "no embeddings" in str(error), error
        return
    scores = [result["relevance_score"] for result in reranked(embedder).results]
    equal((len(scores), scores), (2, sorted(scores, reverse=True)))


def check_wrong_key() -> None:
    """LiteLLM looks for the words, not for the status."""
    error = raised(litellm.AuthenticationError, lambda: asked(api_key="wrong"))

    assert "Incorrect API key provided" in str(error), error


def check_batch() -> None:
    batch = ended(started(batch_lines(TARGET.model, CAPITAL)))

    equal((batch.status, batch.metadata), ("completed", {"for": "a check"}))
    content = litellm.file_content(file_id=batch.output_file_id, **PROVIDER)
    answers = [json.loads(line) for line in content.text.splitlines()]
    equal([answer["custom_id"] for answer in answers], ["1", "2"])
    for answer in answers:
        equal(answer["response"]["body"]["choices"][0]["message"]["content"], ANSWER)


def check_batches_are_listed() -> None:
    made = started(batch_lines(TARGET.model, CAPITAL))

    listed = litellm.list_batches(limit=10, **PROVIDER)

    assert made.id in {batch.id for batch in listed.data}
    ended(made)


def check_batch_cancelled() -> None:
    batch = started(batch_lines(TARGET.model, LONG_STORY, max_tokens=2000, ignore_eos=True))

    litellm.cancel_batch(batch_id=batch.id, **PROVIDER)

    equal(ended(batch).status, "cancelled")


if __name__ == "__main__":
    run(globals())

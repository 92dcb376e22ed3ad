"""vLLM: ``vllm serve MODEL``."""

import json
from collections.abc import Collection

from shared.errors import EngineFailed
from shared.messages import SamplingParams
from worker.engines.adapter import Ask, EngineContent, EngineFacts, EngineTraits, Http, JsonObject
from worker.engines.completions import (
    PATH,
    body_of,
    choice_of,
    end_of,
    named,
    prompt_scores_of,
    scores_of,
    token_ids_of,
)
from worker.text import Tokenizer


class VLLM:
    """Tokens come several at a time, with their ids."""

    traits = EngineTraits(
        name="vllm",
        versions=("0.32",),
        parameters=frozenset(
            (
                *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
                *("repetition_penalty", "presence_penalty", "frequency_penalty"),
                *("min_tokens", "stop_token_ids", "ignore_eos", "bad_words"),
                *("allowed_token_ids", "logprobs", "prompt_logprobs"),
            )
        ),
        constraints=frozenset(("json_schema", "regex")),
        has_min_tokens=True,
        remarks="After a take-over, presence and frequency penalties do not count the tokens "
        "before it. More than 20 logprobs need --max-logprobs. Batches have a lower priority with "
        "--scheduling-policy priority.",
    )
    default_port = 8000
    health_path = "/health"

    def __init__(self) -> None:
        self._model = ""
        self._has_priority = False

    def facts(self, http: Http, names: Collection[str]) -> EngineFacts:
        models = http.get("/v1/models")["data"]
        model = named(models, names) or models[0]
        self._model = model["id"]
        self._has_priority = self._takes_priority(http)
        version = http.get("/version")["version"]
        name = model.get("root") or model["id"]
        return EngineFacts(version, name, max_seq_len=model["max_model_len"])

    def tokenize(self, http: Http, text: str) -> list[int] | None:
        asked = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return list(http.post("/tokenize", asked)["tokens"])

    def call(self, ask: Ask, tokenizer: Tokenizer) -> "VLLMCall":
        return VLLMCall(ask, self._model, has_priority=self._has_priority)

    def _takes_priority(self, http: Http) -> bool:
        """No endpoint says how the server schedules. It refuses a priority that it does not
        heed."""
        ask = Ask([0], 1, SamplingParams(), seed=0, is_batch=True)
        call = VLLMCall(ask, self._model, has_priority=True)
        try:
            http.post(call.path, {**call.body, "stream": False})
        except EngineFailed:
            return False
        return True


class VLLMCall:
    path = PATH

    def __init__(self, ask: Ask, model: str, *, has_priority: bool) -> None:
        sampling = ask.sampling
        self._num_top = sampling.logprobs
        self._ask = ask
        self.body: JsonObject = {
            **body_of(ask, model),
            "prompt": list(ask.token_ids),
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": {str(one): bias for one, bias in sampling.logit_bias.items()},
            "min_tokens": ask.min_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "bad_words": list(sampling.bad_words),
            "allowed_token_ids": None if ask.allowed_ids is None else list(ask.allowed_ids),
            "logprobs": sampling.logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            **({"priority": int(ask.is_batch)} if has_priority else {}),
            **_structured(ask),
            **_scored(ask),
        }

    def read(self, event: JsonObject) -> EngineContent:
        choice, num_top = choice_of(event), self._ask.num_prompt_top
        if num_top is not None:
            try:
                scores = prompt_scores_of(choice, self._ask.token_ids, num_top)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise EngineFailed(
                    f"The engine's prompt_logprobs are unusual: {error!r}"
                ) from error
            return EngineContent(prompt_scores=scores)
        return EngineContent(token_ids_of(choice), scores_of(choice, self._num_top), end_of(choice))


def _structured(ask: Ask) -> JsonObject:
    if ask.constraint is None:
        return {}
    source = ask.constraint.source
    is_json = ask.constraint.kind == "json_schema"
    return {"structured_outputs": {"json": json.loads(source)} if is_json else {"regex": source}}


def _scored(ask: Ask) -> JsonObject:
    """Streams have no scores of the prompt."""
    if ask.num_prompt_top is None:
        return {}
    return {"prompt_logprobs": ask.num_prompt_top, "logprobs": None, "stream": False}

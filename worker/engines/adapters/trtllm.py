"""TensorRT-LLM: ``trtllm-serve MODEL``."""

from collections.abc import Collection

from worker.engines.adapter import Ask, EngineContent, EngineFacts, EngineTraits, Http, JsonObject
from worker.engines.completions import (
    PATH,
    biases_of,
    body_of,
    choice_of,
    end_of,
    token_ids_of,
)
from worker.text import Tokenizer


class TensorRT:
    """Requests switch detokenization off, so that events carry token ids."""

    traits = EngineTraits(
        name="trtllm",
        versions=("1.2",),
        was_run=False,
        parameters=frozenset(
            (
                *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
                *("repetition_penalty", "presence_penalty", "frequency_penalty"),
                *("min_tokens", "stop_token_ids", "ignore_eos"),
            )
        ),
        states_max_seq_len=False,
        has_min_tokens=True,
        remarks="The server has no endpoint that tokenizes, so that the worker cannot compare the "
        "vocabularies.",
    )
    default_port = 8000
    health_path = "/health"

    def __init__(self) -> None:
        self._model = ""

    def facts(self, http: Http, names: Collection[str]) -> EngineFacts:
        self._model = http.get("/v1/models")["data"][0]["id"]
        return EngineFacts(http.get("/version")["version"], self._model)

    def tokenize(self, http: Http, text: str) -> list[int] | None:
        return None

    def call(self, ask: Ask, tokenizer: Tokenizer) -> "TensorRTCall":
        return TensorRTCall(ask, self._model, tokenizer.vocab_size)


class TensorRTCall:
    path = PATH

    def __init__(self, ask: Ask, model: str, vocab_size: int) -> None:
        sampling = ask.sampling
        biases = biases_of(ask, vocab_size)
        self.body: JsonObject = {
            **body_of(ask, model),
            "prompt": list(ask.token_ids),
            "add_special_tokens": False,
            "detokenize": False,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": {str(one): bias for one, bias in biases.items()} or None,
            "min_tokens": ask.min_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "include_stop_str_in_output": True,  # otherwise the stop token is left out
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
        }

    def read(self, event: JsonObject) -> EngineContent:
        choice = choice_of(event)
        return EngineContent(token_ids_of(choice), (), end_of(choice))

"""SGLang: ``python -m sglang.launch_server --model-path MODEL``."""

from collections.abc import Collection
from typing import Any

from shared.errors import EngineFailed
from worker.engine.interface import TokenScore
from worker.engines.adapter import (
    UNKNOWN,
    Ask,
    EngineContent,
    EngineFacts,
    EngineTraits,
    Http,
    JsonObject,
)
from worker.engines.completions import biases_of, score_of
from worker.text import Tokenizer

_BAN = -1e9


class SGLang:
    """Its own endpoint takes and returns token ids."""

    traits = EngineTraits(
        name="sglang",
        versions=("0.5",),
        was_run=False,
        parameters=frozenset(
            (
                *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
                *("repetition_penalty", "presence_penalty", "frequency_penalty"),
                *("min_tokens", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs"),
            )
        ),
        constraints=frozenset(("json_schema", "regex")),
        repeats_seeds=False,
        states_num_slots=True,
        has_min_tokens=True,
        remarks="Seeds count with --enable-deterministic-inference alone. After a take-over, "
        "presence and frequency penalties do not count the tokens before it. Batches have a lower "
        "priority with --enable-priority-scheduling.",
    )
    default_port = 30000
    health_path = "/health"

    def __init__(self) -> None:
        self._priorities: tuple[int, int] | None = None
        """The priorities of interactive and of batch jobs; None: the server has no priorities."""

    def facts(self, http: Http, names: Collection[str]) -> EngineFacts:
        server = http.get("/get_server_info")
        is_low_first = server.get("schedule_low_priority_values_first")
        has_priority = server.get("enable_priority_scheduling")
        self._priorities = ((0, 1) if is_low_first else (1, 0)) if has_priority else None
        model = http.get("/v1/models")["data"][0]
        return EngineFacts(
            str(server.get("version", UNKNOWN)),
            http.get("/get_model_info")["model_path"],
            max_seq_len=model["max_model_len"],
            num_slots=server.get("max_running_requests"),
        )

    def tokenize(self, http: Http, text: str) -> list[int] | None:
        try:
            answer = http.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        except EngineFailed:  # earlier versions have no such endpoint
            return None
        return list(answer["tokens"])

    def call(self, ask: Ask, tokenizer: Tokenizer) -> "SGLangCall":
        priority = None if self._priorities is None else self._priorities[ask.is_batch]
        return SGLangCall(ask, tokenizer.vocab_size, priority)


class SGLangCall:
    path = "/generate"

    def __init__(self, ask: Ask, vocab_size: int, priority: int | None) -> None:
        sampling = ask.sampling
        self._num_top = sampling.logprobs
        self._num_prompt_top = ask.num_prompt_top
        self._num_known = 0
        biases = biases_of(ask, vocab_size, _BAN)
        params: dict[str, Any] = {
            "max_new_tokens": ask.max_tokens,
            "min_new_tokens": ask.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "sampling_seed": ask.seed,
            "logit_bias": {str(one): bias for one, bias in biases.items()} or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
        }
        if ask.constraint is not None:
            params[ask.constraint.kind] = ask.constraint.source
        self.body: JsonObject = {
            "input_ids": list(ask.token_ids),
            "sampling_params": params,
            "stream": True,
            "return_logprob": sampling.logprobs is not None,
            "top_logprobs_num": sampling.logprobs or 0,
            **({} if priority is None else {"priority": priority}),
            **_scored(ask),
        }

    def read(self, event: JsonObject) -> EngineContent:
        """Read an event, whose ids are all ids of the output, or only the new ids if the server is
        started with incremental output."""
        try:
            facts = event["meta_info"]
            if self._num_prompt_top is not None:
                return EngineContent(prompt_scores=_scores(facts, "input", 1, self._num_prompt_top))
            num_tokens, token_ids = facts["completion_tokens"], event["output_ids"]
            num_new = num_tokens - self._num_known
            if num_new < 0:
                raise EngineFailed("The engine's events are out of order.")
            if len(token_ids) not in (num_new, num_tokens):
                raise EngineFailed(f"The engine counts {num_tokens} tokens, and sent others.")
            self._num_known = num_tokens
            new_ids = token_ids[len(token_ids) - num_new :]
            return EngineContent(
                new_ids, self._scores(facts, num_new), _end_of(facts["finish_reason"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"The engine's event is not one of SGLang's: {error!r}") from error

    def _scores(self, facts: JsonObject, num_new: int) -> list[TokenScore]:
        if self._num_top is None or not num_new:
            return []
        return _scores(facts, "output", -num_new, self._num_top)


def _scored(ask: Ask) -> JsonObject:
    if ask.num_prompt_top is None:
        return {}
    scores = {"return_logprob": True, "logprob_start_len": 0}
    return {**scores, "top_logprobs_num": ask.num_prompt_top, "stream": False}


def _scores(facts: JsonObject, side: str, start: int, num_top: int) -> list[TokenScore]:
    """The scores of the tokens of a side, ``input`` or ``output``, from ``start`` on."""
    drawn = facts[f"{side}_token_logprobs"][start:]
    tops = facts[f"{side}_top_logprobs"][start:] if num_top else [[]] * len(drawn)
    return [
        score_of(logprob, {token: value for value, token, _ in top}, num_top)
        for (logprob, _, _), top in zip(drawn, tops, strict=True)
    ]


def _end_of(reason: JsonObject | None) -> Any:
    if reason is None:
        return None
    if reason["type"] not in ("stop", "length"):
        raise EngineFailed(f"The engine ended the stream: {reason.get('message', reason['type'])}")
    return reason["type"]

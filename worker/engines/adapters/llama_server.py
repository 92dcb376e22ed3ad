"""llama.cpp's ``llama-server``."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shared.errors import EngineFailed
from worker.engine.interface import TokenScore
from worker.engines.adapter import Ask, EngineContent, EngineFacts, EngineTraits, Http, JsonObject
from worker.engines.completions import biases_of, score_of
from worker.text import Tokenizer

_MAX_PIECES = 4
"""The most tokens of a character: a character has at most four bytes."""
_ENDS = {"eos": "stop", "limit": "length"}
_UNKNOWN = TokenScore(math.nan, [], [])


class LlamaServer:
    """Every sampling parameter is set, because the server's defaults are not neutral."""

    traits = EngineTraits(
        name="llama-server",
        versions=("b11434", "b1-0c1e570"),
        parameters=frozenset(
            (
                *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
                *("repetition_penalty", "presence_penalty", "frequency_penalty"),
                *("ignore_eos", "logprobs"),
            )
        ),
        constraints=frozenset(("json_schema",)),
        states_num_slots=True,
        remarks="Presence and frequency penalties count the tokens of the prompt, too. Of the "
        "tokens of one character, only the last one has a logprob.",
    )
    default_port = 8080
    health_path = "/health"

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}

    def facts(self, http: Http, names: Collection[str]) -> EngineFacts:
        props = http.get("/props")
        meta = http.get("/v1/models")["data"][0]["meta"]
        return EngineFacts(
            str(props["build_info"]),
            f"{props['model_path']} {meta['n_params']} {meta['size']}",
            max_seq_len=props["default_generation_settings"]["n_ctx"],
            num_slots=props["total_slots"],
            vocab_size=meta["n_vocab"],
        )

    def tokenize(self, http: Http, text: str) -> list[int] | None:
        return list(http.post("/tokenize", {"content": text, "add_special": False})["tokens"])

    def call(self, ask: Ask, tokenizer: Tokenizer) -> "LlamaServerCall":
        if not self._ids:
            known = range(min(tokenizer.vocab_size, tokenizer.num_entries))
            self._ids = {tokenizer.token_bytes(token_id): token_id for token_id in known}
        return LlamaServerCall(ask, tokenizer, self._ids)


class LlamaServerCall:
    """For a character of several tokens, a stream has only the last token; the others are found by
    the character's text. A request for a few tokens is not streamed, and its answer has them
    all."""

    path = "/completion"

    def __init__(self, ask: Ask, tokenizer: Tokenizer, ids: Mapping[bytes, int]) -> None:
        """``ids`` are the token ids by the bytes of the tokens."""
        sampling = ask.sampling
        self._tokenizer = tokenizer
        self._ids = ids
        self._num_top = sampling.logprobs
        self._num_known = 0
        is_short = ask.max_tokens <= _MAX_PIECES
        penalizes = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty
            or sampling.frequency_penalty
        )
        self.body: JsonObject = {
            "prompt": list(ask.token_ids),
            "stream": not is_short,
            "return_tokens": True,
            "cache_prompt": True,
            # The tokens of the last character come with the token that completes it.
            "n_predict": ask.max_tokens + (0 if is_short else _MAX_PIECES - 1),
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repeat_last_n": len(ask.token_ids) + ask.max_tokens if penalizes else 0,
            "seed": ask.seed,
            "logit_bias": _biases(ask, tokenizer.vocab_size),
            "ignore_eos": sampling.ignore_eos,
            "n_probs": 0 if sampling.logprobs is None else max(1, sampling.logprobs),
            "stop": [],
            **_schema(ask),
        }

    def read(self, event: JsonObject) -> EngineContent:
        try:
            num_tokens, token_ids = event["tokens_predicted"], event["tokens"]
            end = self._end_of(event)
            num_missing = num_tokens - self._num_known - len(token_ids)
            if num_missing < 0:
                raise EngineFailed("The engine's events are out of order.")
            if num_missing and token_ids:
                text = event["content"].encode()
                token_ids = [*self._missing(text, num_missing, token_ids[0]), *token_ids]
            self._num_known += len(token_ids)
            return EngineContent(token_ids, self._scores(event, token_ids), end)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"The engine's event is not llama-server's: {error!r}") from error

    def _end_of(self, event: JsonObject) -> Any:
        if not event["stop"]:
            return None
        if event["stop_type"] not in _ENDS:
            raise EngineFailed(f"The engine ended the stream with {event['stop_type']!r}.")
        return _ENDS[event["stop_type"]]

    def _missing(self, text: bytes, num_missing: int, last: int) -> Sequence[int]:
        """The tokens before ``last`` whose bytes, followed by the bytes of ``last``, are
        ``text``."""
        usual = self._tokenizer.encode_within(text.decode()) or []
        if len(usual) == num_missing + 1 and usual[-1] == last:
            return usual[:-1]
        rest = text.removesuffix(self._tokenizer.token_bytes(last))
        found = _divided(rest, num_missing, self._ids)
        if found is None:
            raise EngineFailed("The engine's stream lacks tokens that its text does not tell.")
        return found

    def _scores(self, event: JsonObject, token_ids: Sequence[int]) -> list[TokenScore | None]:
        if self._num_top is None or not token_ids:
            return []
        given = list(event.get("completion_probabilities", ()))
        scores: list[TokenScore | None] = []
        for token_id in token_ids:
            if given and given[0]["id"] == token_id:
                one = given.pop(0)
                top = {top["id"]: top["logprob"] for top in one["top_logprobs"]}
                scores.append(score_of(one["logprob"], top, self._num_top))
            else:
                scores.append(_UNKNOWN)
        return scores


def _biases(ask: Ask, vocab_size: int) -> list[list[Any]]:
    banned = biases_of(ask, vocab_size, float("-inf"))
    return [
        [token_id, False if bias == float("-inf") else bias] for token_id, bias in banned.items()
    ]


def _schema(ask: Ask) -> JsonObject:
    return {} if ask.constraint is None else {"json_schema": json.loads(ask.constraint.source)}


def _divided(rest: bytes, num_parts: int, ids: Mapping[bytes, int]) -> list[int] | None:
    """``rest`` as so many tokens."""
    if not num_parts:
        return None if rest else []
    for size in range(1, len(rest) - num_parts + 2):
        token_id = ids.get(rest[:size])
        if token_id is not None:
            others = _divided(rest[size:], num_parts - 1, ids)
            if others is not None:
                return [token_id, *others]
    return None

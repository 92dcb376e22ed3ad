"""Servers that return text alone, by OpenAI's ``/v1/completions``: TGI, TabbyAPI, Triton, Ollama,
hosted services."""

from collections.abc import Collection, Sequence

from shared.errors import EngineFailed, StartupError
from shared.messages import TextPrompt
from worker.engines.adapter import (
    UNKNOWN,
    Ask,
    EngineContent,
    EngineFacts,
    EngineTraits,
    Http,
    JsonObject,
)
from worker.engines.completions import PATH, body_of, choice_of, end_of, named
from worker.text import Tokenizer

_MAX_NAMED = 20
"""Models that an error names: a hosted service has hundreds."""


class OpenAI:
    """The server answers with text, from which the worker's tokenizer makes the tokens."""

    traits = EngineTraits(
        name="openai",
        versions=("llama-server b1-0c1e570", "vLLM 0.32"),
        parameters=frozenset(
            ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
        ),
        has_token_ids=False,
        repeats_seeds=False,
        states_max_seq_len=False,
        remarks="Only the text is kept across a take-over: the tokens are those of the text, by "
        "the tokenizer of --model. Of several models, --served-name or --model names the one that "
        "is used.",
    )
    default_port = 8000
    health_path = "/v1/models"

    def __init__(self) -> None:
        self._model = ""

    def facts(self, http: Http, names: Collection[str]) -> EngineFacts:
        models = http.get("/v1/models")["data"]
        model = named(models, names)
        if model is None and len(models) == 1:
            (model,) = models
        if model is None:
            served = ", ".join(str(one["id"]) for one in models[:_MAX_NAMED])
            raise StartupError(
                f"none of the engine's {len(models)} models is {' or '.join(names)}: name one of "
                f"them with --served-name: {served}"
            )
        self._model = model["id"]
        return EngineFacts(UNKNOWN, self._model, max_seq_len=model.get("max_model_len"))

    def tokenize(self, http: Http, text: str) -> list[int] | None:
        return None

    def call(self, ask: Ask, tokenizer: Tokenizer) -> "OpenAICall":
        return OpenAICall(ask, self._model, tokenizer)


class OpenAICall:
    path = PATH

    def __init__(self, ask: Ask, model: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_first = not ask.num_output_ids
        """Whether the next text is the first text of the output."""
        self.body: JsonObject = {**body_of(ask, model), "prompt": _prompt(ask, tokenizer)}

    def read(self, event: JsonObject) -> EngineContent:
        choice = choice_of(event)
        text, end = choice.get("text") or "", end_of(choice)
        if not isinstance(text, str):
            raise EngineFailed("The engine's event has no text.")
        return EngineContent(self._tokens_of(text) if text else (), (), end)

    def _tokens_of(self, text: str) -> Sequence[int]:
        token_ids = self._first(text) if self._is_first else self._tokenizer.encode_within(text)
        if token_ids is None:
            raise EngineFailed("The engine's text cannot be written with the model's tokens.")
        self._is_first = False
        return token_ids

    def _first(self, text: str) -> Sequence[int] | None:
        token_ids = self._tokenizer.encode_text(text)
        return token_ids if self._tokenizer.decode(token_ids) == text else None


def _prompt(ask: Ask, tokenizer: Tokenizer) -> str:
    """The text of the prompt, and the text of the output as the client has it: some tokenizers put
    a space before the first word of a text. The server adds the special tokens before a text
    itself."""
    start = len(ask.token_ids) - ask.num_output_ids
    prompt_ids, output_ids = ask.token_ids[:start], ask.token_ids[start:]
    added = tokenizer.encode(TextPrompt(text=""), may_be_empty=True)
    if added and list(prompt_ids[: len(added)]) == added:
        prompt_ids = prompt_ids[len(added) :]
    return tokenizer.decode(prompt_ids) + tokenizer.decode(output_ids)

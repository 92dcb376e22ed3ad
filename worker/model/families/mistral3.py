"""The language model of a Mistral Small 3.1, or a Ministral 3, that also has a tower for images."""

from worker.model.config import Config, NotNative
from worker.model.families import ministral3, mistral
from worker.model.spec import ModelSpec, Names

_NAMES = Names(
    prefixes=("language_model.model.", "model.language_model."),
    heads=("language_model.lm_head", "lm_head"),
    is_within=True,
)
_READERS = {"mistral": mistral.read, "ministral3": ministral3.read}


def read(config: Config) -> ModelSpec:
    inner = config.within("text_config")
    kind = inner.get("model_type", "mistral")
    if kind not in _READERS:
        raise NotNative(f"its language model is a {kind}")
    return _READERS[kind](inner, _NAMES)

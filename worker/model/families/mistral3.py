"""The language model of a Mistral Small 3.1 or 4, or a Ministral 3, that also has a tower for
images."""

from worker.model.config import Config, NotNative
from worker.model.families import ministral3, mistral, mistral4
from worker.model.spec import ModelSpec, Names

_READERS = {
    "mistral": (mistral.read, Names()),
    "ministral3": (ministral3.read, Names()),
    "mistral4": (mistral4.read, mistral4.NAMES),
}


def read(config: Config) -> ModelSpec:
    inner = config.within("text_config")
    kind = inner.get("model_type", "mistral")
    if kind not in _READERS:
        raise NotNative(f"its language model is a {kind}")
    read_text, names = _READERS[kind]
    return read_text(inner, names.within())

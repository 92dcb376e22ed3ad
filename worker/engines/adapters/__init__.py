"""Each kind of server has an adapter: a file, and an entry in `ADAPTERS`."""

from worker.engines.adapter import Adapter
from worker.engines.adapters.llama_server import LlamaServer
from worker.engines.adapters.openai import OpenAI
from worker.engines.adapters.sglang import SGLang
from worker.engines.adapters.trtllm import TensorRT
from worker.engines.adapters.vllm import VLLM

ADAPTERS: dict[str, Adapter] = {
    adapter.traits.name: adapter
    for adapter in (VLLM(), SGLang(), LlamaServer(), TensorRT(), OpenAI())
}
"""The adapters by the values of ``--engine``."""

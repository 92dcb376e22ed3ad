"""vLLM on random weights: ``TASK ANSWER`` name two JSON files."""

import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main(task_path: Path, answer_path: Path) -> None:
    vllm: Any = importlib.import_module("vllm")

    library: Any = importlib.import_module("transformers")
    task = json.loads(task_path.read_text())
    with tempfile.TemporaryDirectory() as directory:
        config = library.LlamaConfig(
            **task["model"], architectures=["LlamaForCausalLM"], dtype=task["dtype"]
        )
        config.save_pretrained(directory)
        llm = vllm.LLM(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=task["dtype"],
            max_model_len=task["max_seq_len"],
            max_num_seqs=task["max_num_seqs"],
            max_num_batched_tokens=task["max_num_batched_tokens"],
            enable_prefix_caching=False,
        )
    requests = task["requests"]
    prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
    options = [
        vllm.SamplingParams(
            temperature=0, max_tokens=request["num_outputs"], ignore_eos=True, detokenize=False
        )
        for request in requests
    ]
    llm.generate(prompts[:2], options[:2], use_tqdm=False)
    began = time.perf_counter()
    outputs = llm.generate(prompts, options, use_tqdm=False)
    seconds = time.perf_counter() - began
    answer = {
        "seconds": seconds,
        "num_outputs": sum(len(output.outputs[0].token_ids) for output in outputs),
        "num_prompt_tokens": sum(len(request["prompt_ids"]) for request in requests),
    }
    answer_path.write_text(json.dumps(answer))


# vLLM starts processes that import this module.
if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

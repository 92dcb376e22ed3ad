"""transformers' continuous batching on random weights. ``TASK ANSWER`` name two JSON files."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers


def main(task_path: Path, answer_path: Path) -> None:
    library: Any = transformers
    task = json.loads(task_path.read_text())
    model = _model(task)
    options = library.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=task["max_seq_len"]
    )
    requests = task["requests"]
    # Its defaults; but on the CPU it would take most of the memory for its cache.
    room = library.generation.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    with model.continuous_batching_context_manager(
        generation_config=options,
        continuous_batching_config=room if task["device"] == "cpu" else None,
    ) as manager:
        _run(manager, requests[:2])
        began = time.perf_counter()
        num_outputs = _run(manager, requests)
        seconds = time.perf_counter() - began
    expected = sum(request["num_outputs"] for request in requests)
    if num_outputs != expected:
        raise SystemExit(f"{num_outputs} tokens came, {expected} were asked for")
    answer = {
        "seconds": seconds,
        "num_outputs": num_outputs,
        "num_prompt_tokens": sum(len(request["prompt_ids"]) for request in requests),
    }
    answer_path.write_text(json.dumps(answer))


def _model(task: dict[str, Any]) -> Any:
    library: Any = transformers
    config = library.LlamaConfig(**task["model"])
    with torch.device(task["device"]):
        model = library.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, task["dtype"]), attn_implementation="sdpa"
        )
    return model.eval()


def _run(manager: Any, requests: list[dict[str, Any]]) -> int:
    """The number of tokens that were returned when all requests have ended."""
    for request in requests:
        manager.add_request(
            request["prompt_ids"], max_new_tokens=request["num_outputs"], eos_token_id=-1
        )
    num_left, num_outputs = len(requests), 0
    while num_left:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise SystemExit("its generation thread has ended")
        elif result.error is not None:
            raise SystemExit(f"a request failed: {result.error}")
        elif result.is_finished():
            num_left -= 1
            num_outputs += len(result.generated_tokens)
    return num_outputs


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Parameters of OpenAI and vLLM that are not supported: refused by name, never ignored.

Each is listed with the values that ask for nothing; null, {} and [] never arrive here. Parameters
that change no answer (``store``, ``metadata``, ``service_tier``, ...) and those that nobody knows
are not listed, and so tolerated.
"""

from collections.abc import Mapping
from typing import Any

from shared.errors import InvalidRequest

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "modalities": (["text"],),
    "prediction": (),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "cache_salt": (),
    "chat_template": (),
    "detokenize": (True,),
    "documents": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    # llama.cpp
    "cache_prompt": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "json_schema": (),
    "mirostat": (0,),
    "n_keep": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "samplers": (),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
CHAT_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "add_special_tokens": (False,),
    "best_of": (1,),
    "echo": (False,),
    "prompt": (),
}
COMPLETION_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "add_generation_prompt": (True,),
    "chat_template_kwargs": (),
    "continue_final_message": (False,),
    "messages": (),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (0,),
}


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raise `InvalidRequest` for the first parameter of ``body`` that asks for something which
    ``neutral`` lists as not supported."""
    for name, value in body.items():
        if name in neutral and not any(_is_same(value, other) for other in neutral[name]):
            raise InvalidRequest(f"{name} is not supported, but for its neutral value.", param=name)


def _is_same(value: object, other: object) -> bool:
    # priority=False is not priority=0, though Python calls them equal.
    return value == other and isinstance(value, bool) == isinstance(other, bool)

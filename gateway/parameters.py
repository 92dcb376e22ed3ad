"""Parameters of OpenAI and vLLM that are not built yet: refused by name, never ignored.

Each is listed with the values that ask for nothing; null, {} and [] never arrive here. Parameters
that change no answer (``store``, ``metadata``, ``service_tier``, ...) and those that nobody knows
are not listed, and so tolerated.
"""

from collections.abc import Mapping
from typing import Any

from shared.errors import InvalidRequest

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": (),
    "logit_bias": (),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": (),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


def refuse_unsupported(extra: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for the first parameter of ``extra`` that asks for something."""
    for name, value in extra.items():
        neutral = _NEUTRAL.get(name)
        if neutral is not None and not any(_is_same(value, other) for other in neutral):
            raise InvalidRequest(
                f"{name} is not supported yet, but for its neutral value.", param=name
            )


def _is_same(value: object, other: object) -> bool:
    # logprobs=0 asks for something and logprobs=False does not, though Python calls them equal.
    return value == other and isinstance(value, bool) == isinstance(other, bool)

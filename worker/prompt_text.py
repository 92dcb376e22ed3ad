"""A prompt as text, for those who want it back with the answer."""

from collections.abc import Sequence

from shared.messages import Prompt, TextPrompt
from worker.text import Tokenizer


def prompt_text(prompt: Prompt, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of a prompt; a chat's is what the template made of it."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    stream = tokenizer.text_stream()
    return "".join(map(stream.push, prompt_ids)) + stream.flush()

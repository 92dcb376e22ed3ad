"""Conversion between text and token ids, independent of the engine and the bus.

`Tokenizer` applies the chat template and encodes prompts, in the threads of `TextThreads`, and
`TextStream` decodes a choice's tokens up to its stop string. `reasoning_parser` and `tool_parser`
detect the formats of a model's chat template.
"""

from worker.text.parsers import (
    reasoning_parser,
    reasoning_switches,
    tool_parser,
    with_known_calls,
)
from worker.text.stream import TextStream
from worker.text.threads import TextThreads
from worker.text.tokenizer import Tokenizer, stated_vocab_size

__all__ = [
    "TextStream",
    "TextThreads",
    "Tokenizer",
    "reasoning_parser",
    "reasoning_switches",
    "stated_vocab_size",
    "tool_parser",
    "with_known_calls",
]

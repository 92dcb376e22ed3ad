"""Text in, token ids out; token ids in, text out. Nothing here knows of the engine or the bus."""

from worker.text.parsers import reasoning_parser, tool_parser
from worker.text.stream import TextStream
from worker.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer", "reasoning_parser", "tool_parser"]

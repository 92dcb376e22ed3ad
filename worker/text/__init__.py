"""Conversion between text and token ids, independent of the engine and the bus."""

from worker.text.parsers import reasoning_parser, tool_parser
from worker.text.stream import TextStream
from worker.text.threads import TextThreads
from worker.text.tokenizer import Tokenizer

__all__ = ["TextStream", "TextThreads", "Tokenizer", "reasoning_parser", "tool_parser"]

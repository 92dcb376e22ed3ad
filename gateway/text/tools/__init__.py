"""Parsers of tool calls: a parser for each format in which models write calls.

`TOOL_PARSERS` lists them by name.
"""

from collections.abc import Callable, Mapping
from functools import partial

from gateway.text.pieces import Parser
from gateway.text.tools.calls import Names
from gateway.text.tools.delimited import DEEPSEEK_V3, KIMI_K2, DelimitedParser
from gateway.text.tools.gemma import FUNCTIONGEMMA, GEMMA4, gemma_parser
from gateway.text.tools.harmony import HARMONY, HarmonyParser
from gateway.text.tools.hermes import HermesParser
from gateway.text.tools.llama3 import Llama3Parser
from gateway.text.tools.mistral import MistralParser
from gateway.text.tools.pythonic import PythonicParser
from gateway.text.tools.tagged import GLM45, QWEN3_CODER, tagged_parser

TOOL_PARSERS: Mapping[str, Callable[[Names], Parser]] = {
    "deepseek_v3": partial(DelimitedParser, DEEPSEEK_V3),
    "functiongemma": partial(gemma_parser, FUNCTIONGEMMA),
    "gemma4": partial(gemma_parser, GEMMA4),
    "glm45": partial(tagged_parser, GLM45),
    HARMONY: HarmonyParser,
    "hermes": HermesParser,
    "kimi_k2": partial(DelimitedParser, KIMI_K2),
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": partial(tagged_parser, QWEN3_CODER),
}
"""The parsers of tool calls, by their names in workers' announcements. Each is given the names of
the functions that may be called."""
TAGGED = frozenset({"glm45", "qwen3_coder"})
"""The parsers that are given the text parameters of each function, by its name."""

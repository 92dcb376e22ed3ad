"""Parsers of tool calls, one for each format in which models write them.

`TOOL_PARSERS` lists them by name.
"""

from collections.abc import Callable, Mapping

from gateway.text.pieces import Parser
from gateway.text.tools.calls import Names
from gateway.text.tools.hermes import HermesParser
from gateway.text.tools.llama3 import Llama3Parser
from gateway.text.tools.mistral import MistralParser

TOOL_PARSERS: Mapping[str, Callable[[Names], Parser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}
"""By the names in workers' announcements. Each is given the names of the functions that may be
called."""

"""The formats in which models write tool calls: a module for each format, or for formats of one
structure.

`TOOL_FORMATS` lists them by name. `tool_format` says what a format consists of; `rules` and
`arguments` are the parts of its grammar.
"""

from collections.abc import Mapping

from gateway.text.reasoning import HARMONY
from gateway.tool_formats import harmony, hermes, llama3, mistral, pythonic
from gateway.tool_formats.delimited import DEEPSEEK_V3, KIMI_K2
from gateway.tool_formats.gemma import FUNCTIONGEMMA, GEMMA4
from gateway.tool_formats.tagged import GLM45, QWEN3_CODER
from gateway.tool_formats.tool_format import ToolFormat

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseek_v3": DEEPSEEK_V3,
    "functiongemma": FUNCTIONGEMMA,
    "gemma4": GEMMA4,
    "glm45": GLM45,
    HARMONY: harmony.FORMAT,
    "hermes": hermes.FORMAT,
    "kimi_k2": KIMI_K2,
    "llama3_json": llama3.FORMAT,
    "mistral": mistral.FORMAT,
    "pythonic": pythonic.FORMAT,
    "qwen3_coder": QWEN3_CODER,
}
"""The formats of tool calls, by their names in workers' announcements."""

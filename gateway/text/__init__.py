"""Parses the text of a choice into reasoning, content and tool calls.

The result is a pure function of the text and independent of how it is divided into pieces. `pieces`
defines the parts and the parser's protocol, `reasoning` the parser of thoughts. The parsers of tool
calls are in `gateway.tool_formats`, and are made of `tags`, `calls` and `enclosed`.
"""

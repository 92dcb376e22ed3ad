"""Parses the text of a choice into reasoning, content and tool calls.

The result is a pure function of the text and independent of how it is divided into pieces. `pieces`
defines the parts and the parser's protocol, `reasoning` and `tools` the parsers.
"""

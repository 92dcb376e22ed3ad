"""The text of a choice, taken apart: what the model thinks, what it says, which tools it calls.

All of it is a pure function of the text: the same text in other pieces has the same parts. `pieces`
has the parts and the parser's protocol, `reasoning` and `tools` the parsers.
"""

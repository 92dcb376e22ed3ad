"""The weights of a decoder, read from a checkpoint and laid out as they are multiplied with.

`layers` reads them; `matrices`, `awq` and `gguf` are the formats.
"""

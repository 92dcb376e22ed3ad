"""Checkpoints: where models come from, and their files in the user's cache.

`store` finds, downloads and converts them; `checkpoint` and `gguf_file` read their tensors.
"""

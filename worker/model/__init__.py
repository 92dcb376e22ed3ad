"""Runs the model; the only package that imports kernels.

`loading` reads a checkpoint into a decoder and starts a `runner` for it, which computes the steps
that the engine schedules. `embedder` computes embeddings; `echo` is a synthetic model for tests.
"""

"""The decoders: our own for the Llama family (`native`, `fused`), and transformers' for all others.

Each is a `worker.model.forward.Decoder`; `worker.model.loading` chooses one.
"""

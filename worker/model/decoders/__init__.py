"""The decoders: our own for native families (`stack`, `fused`), and transformers' for all others.

Each is a `worker.model.forward.Decoder`; `worker.model.loading` chooses the decoder of a model.
"""

"""Models for tests: tiny checkpoints, tokenizers, grammars, small engines and their batches, the
native library, and the comparison of tensors."""

"""Models for tests: tiny checkpoints, grammars, small engines and their batches, the
native library, and the comparison of tensors."""

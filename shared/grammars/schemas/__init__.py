"""JSON schemas, rewritten so that llguidance obeys them to the letter: `for_generation`."""

from shared.grammars.schemas.generation import for_generation

__all__ = ["for_generation"]

"""What answers have to match, as llguidance takes it, and tried where a bad one does no harm.

`grammar_source` translates a constraint, `TRIALS` finds out whether it can be compiled.
"""

from shared.grammars.trials import (
    JSON_WHITESPACE,
    LIMITS,
    TOO_COSTLY,
    TRIALS,
    Trials,
    grammar_source,
)

__all__ = [
    "JSON_WHITESPACE",
    "LIMITS",
    "TOO_COSTLY",
    "TRIALS",
    "Trials",
    "grammar_source",
]

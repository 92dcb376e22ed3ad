"""Output constraints: conversion to llguidance grammars, and trial compilation in a sandbox.

`grammar_source` converts a constraint, `TRIALS` checks whether it can be compiled.
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

"""Output constraints: conversion to llguidance grammars, and trial compilation in a sandbox.

`grammar_source` converts a constraint, `for_generation` the JSON schemas in it, and `TRIALS` checks
whether it can be compiled, and translates the grammars of llama.cpp that `is_gbnf` recognizes.
"""

from shared.grammars.gbnf import is_gbnf
from shared.grammars.problems import explained
from shared.grammars.schemas import for_generation
from shared.grammars.trials import (
    CALL_CAPTURE,
    ENTRY_RULE,
    LIMITS,
    TOO_COSTLY,
    TRIALS,
    Trials,
    grammar_source,
)

__all__ = [
    "CALL_CAPTURE",
    "ENTRY_RULE",
    "LIMITS",
    "TOO_COSTLY",
    "TRIALS",
    "Trials",
    "explained",
    "for_generation",
    "grammar_source",
    "is_gbnf",
]

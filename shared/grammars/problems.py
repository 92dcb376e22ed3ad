"""llguidance's reasons in words that a client can act on."""

import re
from collections.abc import Sequence

_PROBLEMS: Sequence[tuple["re.Pattern[str]", str]] = tuple(
    (re.compile(pattern, re.DOTALL), sentence)
    for pattern, sentence in (
        (r"NoExtension.*", "nothing matches: a rule or a reference leads back to itself only"),
        (
            r"Pointer '(?P<name>[^']*)' does not exist",
            r"the reference #\g<name> names nothing",
        ),
        (
            r"Resource '(?P<name>[^']*)' is not present.*",
            r"the reference \g<name> leaves the schema; copy what it names into $defs",
        ),
        (
            r"circular references with sibling keys are not supported: (json-schema:///)?(?P<name>\S*)",
            r"the reference \g<name> leads back to itself beside other keywords; "
            "write them into what it names",
        ),
        (
            r"patternProperty regexes (?P<one>/.*/) and (?P<other>/.*/) are not disjoint",
            r"the patterns \g<one> and \g<other> of patternProperties match the same names; "
            "write one pattern for these",
        ),
        (
            r"can't determine if patternProperty regexes (?P<both>.*) are disjoint",
            r"the patterns \g<both> of patternProperties are too complex; write one pattern",
        ),
        (
            r"min/maxProperties only supported.*",
            "minProperties and maxProperties do not count what allOf or a reference adds; "
            "write them beside all properties",
        ),
        (r"Unsatisfiable schema: (?P<reason>.*)", r"no value matches: \g<reason>"),
        (
            r"Unable to determine if regex is empty.*",
            "a pattern or format with minLength or maxLength is too complex; leave the lengths out",
        ),
        (
            r"(schema too large|Schema intersection stack level exceeded)",
            "too many schemas are combined; write fewer allOf, anyOf, oneOf and references",
        ),
        (
            r"oneOf constraints are not supported.*",
            "oneOf: the alternatives are not known to exclude each other; use anyOf",
        ),
        (
            r"Unimplemented keys: \[(?P<names>.*)\]",
            r"\g<names>: not supported; leave it out and check the answer yourself",
        ),
    )
)
_WITHIN = re.compile(r"\s*while processing (?:json-schema:///)?(?P<name>\S+)")
_STATE = re.compile(r"\s*<(?:non-verbose/|state)>.*", re.DOTALL)


def explained(reason: str) -> str:
    """A reason without llguidance's internals; it may be empty."""
    reason = _STATE.sub("", reason)
    within = _WITHIN.search(reason)
    reason = _WITHIN.sub("", reason)
    for pattern, sentence in _PROBLEMS:
        if (match := pattern.fullmatch(reason)) is not None:
            reason = match.expand(sentence)
            break
    return f"{within['name']}: {reason}" if within else reason

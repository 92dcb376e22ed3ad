"""Text of clients as a terminal may show it, with escapes for characters that control it."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_IN_JSON = re.compile(r"[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""What JSON's encoders leave as it is although a terminal obeys it, hides it or reorders the text
because of it. Escape sequences may begin with a character of C1, such as CSI, U+009B."""


def printable(text: str) -> str:
    """``text`` with escapes such as ``\\x1b`` for the characters that would control a terminal."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def escape_controls(text: str) -> str:
    """``text`` of several lines with escapes such as ``\\x1b`` for its control characters, except
    for the ends of lines and tabs."""
    return _CONTROL.sub(lambda found: printable(found[0]), text)


def printable_json(line: str) -> str:
    """A line of JSON with the escapes of JSON for the characters that would control a terminal."""
    if line.isprintable():
        return line
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", line)

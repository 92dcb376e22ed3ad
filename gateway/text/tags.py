"""Finds tags in a text that arrives in pieces."""


class Until:
    """Passes text on up to the first of ``tags``. Whitespace before a tag is part of it."""

    def __init__(self, *tags: str) -> None:
        self._tags = tags
        self._held = ""

    def read(self, text: str) -> tuple[str, str | None, str]:
        """Returns the certain text, the tag with its whitespace if one was found, and the text
        after it."""
        text = self._held + text
        found = [(position, tag) for tag in self._tags if (position := text.find(tag)) >= 0]
        if found:
            self._held = ""
            position, tag = min(found)
            before, after = text[:position].rstrip(), position + len(tag)
            return before, text[len(before) : after], text[after:]
        sure = text[: len(text) - self._num_open(text)].rstrip()
        self._held = text[len(sure) :]
        return sure, None, ""

    def end(self) -> str:
        """The held-back text."""
        held, self._held = self._held, ""
        return held

    def _num_open(self, text: str) -> int:
        """The length of the longest suffix of ``text`` that may be the start of a tag."""
        longest = max(map(len, self._tags)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(tag.startswith(text[-length:]) for tag in self._tags):
                return length
        return 0


class Opening:
    """Decides whether a text starts with one of ``tags``, ignoring whitespace. None of them is the
    beginning of another one."""

    def __init__(self, *tags: str) -> None:
        self._tags = tags
        self._held = ""

    def read(self, text: str) -> tuple[bool | None, str]:
        """Returns whether it does, or None while undecided, and the remaining text."""
        self._held += text
        begun = self._held.lstrip()
        for tag in self._tags:
            if begun.startswith(tag):
                return True, begun[len(tag) :]
        if any(tag.startswith(begun) for tag in self._tags):
            return None, ""
        return False, self._held

    def end(self) -> str:
        """The held-back text."""
        held, self._held = self._held, ""
        return held

"""Finds tags in a text that arrives in pieces."""


class Until:
    """Passes text on up to the first of ``tags``. Whitespace before a tag is part of it."""

    def __init__(self, *tags: str) -> None:
        self._tags = tags
        self._spaces: list[str] = []
        """The whitespace that is held back, because a tag may follow."""
        self._begun = ""
        """The text after the whitespace that may be the start of a tag."""

    def read(self, text: str) -> tuple[str, str | None, str]:
        """Returns the certain text, the tag with its whitespace if a tag was found, and the text
        after it."""
        text = self._begun + text
        found = [(position, tag) for tag in self._tags if (position := text.find(tag)) >= 0]
        if found:
            position, tag = min(found)
            after = position + len(tag)
            before = text[:position].rstrip()
            spaces, self._begun = self._take_spaces(), ""
            if not before:
                return "", spaces + text[:after], text[after:]
            return spaces + before, text[len(before) : after], text[after:]
        num_certain = len(text) - self._num_open(text)
        sure = text[:num_certain].rstrip()
        spaces = self._take_spaces() if sure else ""
        self._spaces.append(text[len(sure) : num_certain])
        self._begun = text[num_certain:]
        return spaces + sure, None, ""

    def end(self) -> str:
        """The held-back text."""
        held, self._begun = self._take_spaces() + self._begun, ""
        return held

    def _take_spaces(self) -> str:
        spaces = "".join(self._spaces)
        self._spaces.clear()
        return spaces

    def _num_open(self, text: str) -> int:
        """The length of the longest suffix of ``text`` that may be the start of a tag."""
        longest = max(map(len, self._tags)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(tag.startswith(text[-length:]) for tag in self._tags):
                return length
        return 0


class Opening:
    """Decides whether a text starts with one of ``tags``, ignoring whitespace. No tag is the
    beginning of another tag."""

    def __init__(self, *tags: str) -> None:
        self._tags = tags
        self._spaces: list[str] = []
        self._begun = ""

    def read(self, text: str) -> tuple[bool | None, str]:
        """Returns whether it does, or None while undecided, and the remaining text."""
        begun = self._begun + (text if self._begun else text.lstrip())
        if not self._begun:
            self._spaces.append(text[: len(text) - len(begun)])
        self._begun = begun
        for tag in self._tags:
            if begun.startswith(tag):
                return True, begun[len(tag) :]
        if any(tag.startswith(begun) for tag in self._tags):
            return None, ""
        return False, self.end()

    def end(self) -> str:
        """The held-back text."""
        held = "".join([*self._spaces, self._begun])
        self._spaces.clear()
        self._begun = ""
        return held

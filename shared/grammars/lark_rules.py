"""Writes rules of GBNF as a grammar in llguidance's dialect of Lark.

llguidance reads a text as lexemes, each of which is as long as possible, whereas GBNF has no
lexemes: ``[a-z]+ "ing"`` matches ``going``. A rule that does not refer to itself is therefore a
single terminal, and so is each part of another rule between two rules that refer to themselves.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

_SEPARATORS = re.compile(r"[_-]+")


class Literal(NamedTuple):
    """A terminal, as it stands in a Lark grammar."""

    lark: str


class TokenReference(NamedTuple):
    """A token of the vocabulary, which cannot be part of a terminal."""

    lark: str


class RuleReference(NamedTuple):
    name: str


class Alternatives(NamedTuple):
    """A group: alternatives, each of which is a sequence."""

    alternatives: tuple[tuple["Node", ...], ...]


class Repeat(NamedTuple):
    node: "Node"
    times: str
    """The operator, as in Lark."""


Node: TypeAlias = Literal | TokenReference | RuleReference | Alternatives | Repeat


class Translation:
    """The rules that the rule ``root`` needs."""

    def __init__(self, rules: Mapping[str, Alternatives]) -> None:
        self._rules = rules
        self._references = {name: _references(rule) for name, rule in rules.items()}
        self._needed = self._reachable()
        self._terminals = self._without_cycles()
        self._are_terminal: dict[int, bool] = {}
        """By the identity of a group or repetition."""
        self._num_named = Counter({"start": 1})
        """How many rules had a name, as far as Lark tells names apart."""
        self._names = {"root": "start"}
        for name in self._needed:
            if name != "root":
                self._names[name] = self._new_name(name, is_terminal=name in self._terminals)
        self._parts: dict[str, str] = {}
        """The names of further terminals, by their definitions."""

    def lark(self) -> str:
        """The whole grammar."""
        lines = [self._definition(name) for name in self._needed]
        parts = [f"{name}: {definition}" for definition, name in self._parts.items()]
        return "\n".join(["%llguidance {}", *lines, *parts])

    def _reachable(self) -> list[str]:
        found = {"root": None}
        waiting = ["root"]
        while waiting:
            for name in self._references[waiting.pop()][0]:
                if name not in found:
                    found[name] = None
                    waiting.append(name)
        return [name for name in self._rules if name in found]

    def _without_cycles(self) -> set[str]:
        """The rules that have no tokens and refer to terminals only."""
        num_open = {name: len(self._references[name][0]) for name in self._needed}
        users: dict[str, list[str]] = {name: [] for name in self._needed}
        for name in self._needed:
            for other in self._references[name][0]:
                users[other].append(name)
        ready = [name for name in self._needed if not num_open[name]]
        terminals: set[str] = set()
        while ready:
            name = ready.pop()
            if self._references[name][1]:
                continue
            terminals.add(name)
            for user in users[name]:
                num_open[user] -= 1
                if not num_open[user]:
                    ready.append(user)
        return terminals

    def _new_name(self, name: str, *, is_terminal: bool) -> str:
        """A name that Lark accepts, and that differs from all others in more than its case."""
        name = _SEPARATORS.sub("_", name).lower()
        if not name[0].isalpha():
            name = f"r{name}"
        # No other name has two underscores.
        self._num_named[name] += 1
        unique = f"{name}__{self._num_named[name]}" if self._num_named[name] > 1 else name
        return unique.upper() if is_terminal else unique

    def _definition(self, name: str) -> str:
        rule = self._rules[name]
        if name == "root" and name in self._terminals:
            return f"start: {self._part(rule)}"
        written = self._alternatives(rule, is_terminal=name in self._terminals)
        return f"{self._names[name]}: {written}"

    def _alternatives(self, choice: Alternatives, *, is_terminal: bool) -> str:
        return " | ".join(
            self._sequence(one, is_terminal=is_terminal) or '""' for one in choice.alternatives
        )

    def _sequence(self, nodes: Iterable[Node], *, is_terminal: bool) -> str:
        if is_terminal:
            return " ".join(self._item(node, is_terminal=True) for node in nodes)
        written: list[str] = []
        together: list[Node] = []
        for node in nodes:
            if self._is_terminal(node):
                together.append(node)
                continue
            written += self._joined(together)
            together = []
            written.append(self._item(node, is_terminal=False))
        return " ".join([*written, *self._joined(together)])

    def _joined(self, nodes: list[Node]) -> list[str]:
        """A single terminal for several."""
        match nodes:
            case []:
                return []
            case [Literal(lark)]:
                return [lark]
            case [RuleReference(name)]:
                return [self._names[name]]
            case _:
                return [self._part(Alternatives((tuple(nodes),)))]

    def _part(self, choice: Alternatives) -> str:
        """The name of a further terminal."""
        definition = self._alternatives(choice, is_terminal=True)
        if definition not in self._parts:
            self._parts[definition] = self._new_name("part", is_terminal=True)
        return self._parts[definition]

    def _item(self, node: Node, *, is_terminal: bool) -> str:
        match node:
            case Literal(lark) | TokenReference(lark):
                return lark
            case RuleReference(name):
                return self._names[name]
            case Repeat(inner, times) if is_terminal:
                return f"({self._item(inner, is_terminal=True)}){times}"
            case Repeat(inner, times):
                return f"({self._sequence([inner], is_terminal=False)}){times}"
            case Alternatives():
                return f"({self._alternatives(node, is_terminal=is_terminal)})"

    def _is_terminal(self, node: Node) -> bool:
        match node:
            case Literal():
                return True
            case TokenReference():
                return False
            case RuleReference(name):
                return name in self._terminals
            case _ if id(node) in self._are_terminal:
                return self._are_terminal[id(node)]
            case Repeat(inner, _):
                is_terminal = self._is_terminal(inner)
            case Alternatives(alternatives):
                is_terminal = all(self._is_terminal(one) for nodes in alternatives for one in nodes)
        self._are_terminal[id(node)] = is_terminal
        return is_terminal


def _references(rule: Alternatives) -> tuple[dict[str, None], bool]:
    """The names in a rule, and whether it has tokens."""
    names: dict[str, None] = {}
    has_tokens = False
    waiting: list[Node] = [rule]
    while waiting:
        match waiting.pop():
            case RuleReference(name):
                names[name] = None
            case TokenReference():
                has_tokens = True
            case Repeat(inner, _):
                waiting.append(inner)
            case Alternatives(alternatives):
                for nodes in alternatives:
                    waiting += nodes
            case Literal():
                pass
    return names, has_tokens

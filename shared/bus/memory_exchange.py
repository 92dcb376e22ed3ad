"""An exchange of the in-memory broker: routes a message to queues by its routing key."""

import re

from shared.bus.base import Exchange
from shared.bus.memory_queue import MemoryQueue


class MemoryExchange:
    """Keys without wildcards, which are nearly all, are looked up without a search."""

    def __init__(self, declared: Exchange) -> None:
        self.declared = declared
        self._exact: dict[str, dict[str, MemoryQueue]] = {}
        self._patterns: list[tuple[re.Pattern[str], MemoryQueue]] = []

    @property
    def bindings(self) -> list[tuple[str, str]]:
        """The routing key and the queue of each binding."""
        exact = [(key, name) for key, queues in self._exact.items() for name in queues]
        patterns = [(regex.pattern, queue.declared.name) for regex, queue in self._patterns]
        return [*exact, *patterns]

    def bind(self, routing_key: str, queue: MemoryQueue) -> None:
        if self.declared.kind == "topic" and re.search(r"[*#]", routing_key):
            bound = (_compile(routing_key), queue)
            if bound not in self._patterns:
                self._patterns.append(bound)
        else:
            self._exact.setdefault(self._key(routing_key), {})[queue.declared.name] = queue

    def unbind(self, routing_key: str, queue: MemoryQueue) -> None:
        key = self._key(routing_key)
        bound = self._exact.get(key, {})
        bound.pop(queue.declared.name, None)
        if not bound:
            self._exact.pop(key, None)
        self._patterns = [(regex, other) for regex, other in self._patterns if other is not queue]

    def route(self, routing_key: str) -> list[MemoryQueue]:
        """The queues bound to a key, without duplicates."""
        queues = self._exact.get(self._key(routing_key), {})
        if self._patterns:
            matching = [q for regex, q in self._patterns if regex.fullmatch(f".{routing_key}")]
            queues = queues | {queue.declared.name: queue for queue in matching}
        return list(queues.values())

    def _key(self, routing_key: str) -> str:
        return "" if self.declared.kind == "fanout" else routing_key


def _compile(pattern: str) -> re.Pattern[str]:
    """Compile a topic pattern (``*`` one word, ``#`` any number) for keys with a dot before each
    word."""
    wildcards = {"*": r"\.[^.]*", "#": r"(?:\.[^.]*)*"}
    words = (wildcards.get(word, rf"\.{re.escape(word)}") for word in pattern.split("."))
    return re.compile("".join(words))

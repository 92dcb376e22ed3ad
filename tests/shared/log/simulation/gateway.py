"""A gateway that reads the log, and the client behind it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from gateway.log.passed import Passed
from shared.log import LogReader, Send
from shared.messages import Failed, Finished, PromptScores, TokenDelta
from tests.shared.log.simulation.broker import Broker
from tests.shared.log.simulation.model import Model

Told: TypeAlias = TokenDelta | Finished | Failed


@dataclass
class Client:
    """Collects the events of a stream, and the id of the last one."""

    model: Model
    place: str = ""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    num_finished: int = 0
    failure: str | None = None

    @property
    def is_done(self) -> bool:
        return self.failure is not None or self.num_finished == self.model.num_choices

    def receive(self, event: Told, place: str) -> None:
        assert not self.is_done, "something after the end"
        self.place = place
        match event:
            case Failed(code=code):
                self.failure = code
            case TokenDelta():
                self._extend(event)
            case Finished():
                self._extend(event)
                assert len(self.tokens[event.choice]) == self.model.length
                self.num_finished += 1

    def _extend(self, event: TokenDelta | Finished) -> None:
        tokens = self.tokens.setdefault(event.choice, [])
        assert event.index == len(tokens), f"token {event.index} after {len(tokens)}"
        tokens.extend(event.token_ids)
        text = self.texts[event.choice] = self.texts.get(event.choice, "") + event.text
        self.model.check(tokens)
        assert text == self.model.text(tokens)


class Gateway:
    """Serves one connection of the client, from the position that the client sends."""

    def __init__(self, broker: Broker, client: Client, *, is_away: bool = False) -> None:
        self.is_away = is_away
        """Whether no client has asked it for the stream yet."""
        self._broker = broker
        self._client = client
        self._passed = Passed.at(client.place)
        self._has_failed = client.failure is not None
        self._reader: LogReader | None = None
        self._cut_off: set[str] = set()
        """Tickets of the runs that were current when the broker was lost."""
        self._num_read = 0
        self._ended: set[int] = set()
        """The choices that have ended in this reading of the log."""
        self._under_way: deque[tuple[Told, str]] = deque()

    @property
    def is_attached(self) -> bool:
        return self._reader is not None and self._broker.reader is self

    def moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        if self.is_away:
            return moves
        if self._under_way:
            moves.append(self._deliver)
        if self._broker.log is None:
            return moves
        if not self.is_attached:
            return moves if self._broker.reader is not None else [*moves, self._attach]
        if self._num_read < len(self._broker.log):
            moves.append(self._read)
        if self._client.is_done:
            moves.append(self._end)
        return moves

    def leave(self) -> None:
        """Stop reading, without acknowledging anything."""
        if self._broker.reader is self:
            self._broker.reader = None
        self._reader = None

    def cut_off(self) -> None:
        """The broker is gone, and may lose what it has delivered."""
        if self._reader is not None and self._reader.ticket is not None:
            self._cut_off.add(self._reader.ticket)
        self.leave()

    def _attach(self) -> None:
        model = self._client.model
        self._broker.reader = self
        self._reader = model.reader_class("r", model.num_choices, self._cut_off)
        self._passed.begin()
        self._num_read = 0
        self._ended.clear()

    def _read(self) -> None:
        assert self._broker.log is not None
        assert self._reader is not None
        event = self._broker.log[self._num_read]
        self._num_read += 1
        for action in self._reader.read(event):
            if isinstance(action, Send):
                self._broker.send(action)
            elif isinstance(action.event, TokenDelta | Finished | Failed):
                self._check_end(action.event)
                self._pass_on(action.event)

    def _check_end(self, event: Told) -> None:
        if not isinstance(event, Failed):
            assert event.choice not in self._ended, "a choice goes on after its end"
        if isinstance(event, Finished):
            self._ended.add(event.choice)

    def _pass_on(self, event: Told) -> None:
        if self._has_failed:
            return
        news: Told | PromptScores | None = event
        if isinstance(event, Failed):
            self._has_failed = True
        else:
            news = self._passed.split(event)[1]
        if news is not None:
            assert not isinstance(news, PromptScores)
            self._under_way.append((news, self._passed.place))

    def _deliver(self) -> None:
        self._client.receive(*self._under_way.popleft())

    def _end(self) -> None:
        self.leave()
        self._broker.log = None

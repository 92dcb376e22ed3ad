"""A gateway that reads the log, and the client behind it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.messages import Failed, Finished, TokenDelta
from shared.stream import LogReader, Relay, Send
from tests.shared.simulation.broker import Broker
from tests.shared.simulation.model import Model


@dataclass
class Client:
    """Counts what it gets, and knows after what to go on."""

    model: Model
    ordinal: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_finished: int = 0
    failure: str | None = None

    @property
    def is_done(self) -> bool:
        return self.failure is not None or self.num_finished == self.model.num_choices

    def receive(self, relay: Relay) -> None:
        assert not self.is_done, "something after the end"
        assert relay.ordinal == self.ordinal + 1, f"{relay.ordinal} after {self.ordinal}"
        self.ordinal = relay.ordinal
        match relay.event:
            case Failed(code=code):
                self.failure = code
            case TokenDelta(choice=choice, token_ids=token_ids):
                self._extend(choice, token_ids)
            case Finished(choice=choice, token_ids=token_ids):
                self._extend(choice, token_ids)
                assert len(self.tokens[choice]) == self.model.length
                self.num_finished += 1

    def _extend(self, choice: int, token_ids: tuple[int, ...]) -> None:
        self.tokens.setdefault(choice, []).extend(token_ids)
        self.model.check(self.tokens[choice])


class Gateway:
    """Serves one connection of the client, from where the client says."""

    def __init__(self, broker: Broker, client: Client, *, is_away: bool = False) -> None:
        self.is_away = is_away
        """Nobody has asked it for the stream yet."""
        self._broker = broker
        self._client = client
        self._after = client.ordinal
        self._reader: LogReader | None = None
        self._num_read = 0
        self._under_way: deque[Relay] = deque()

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
        """Stop reading; nothing is acknowledged."""
        if self._broker.reader is self:
            self._broker.reader = None
        self._reader = None

    def _attach(self) -> None:
        self._broker.reader = self
        self._reader = self._client.model.reader_class("r", self._client.model.num_choices)
        self._num_read = 0

    def _read(self) -> None:
        assert self._broker.log is not None
        assert self._reader is not None
        event = self._broker.log[self._num_read]
        self._num_read += 1
        for action in self._reader.read(event):
            if isinstance(action, Send):
                self._broker.send(action)
            elif (
                isinstance(action.event, TokenDelta | Finished | Failed)
                and action.ordinal > self._after
            ):
                self._after = action.ordinal
                self._under_way.append(action)

    def _deliver(self) -> None:
        self._client.receive(self._under_way.popleft())

    def _end(self) -> None:
        self.leave()
        self._broker.log = None

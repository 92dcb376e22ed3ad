"""A gateway's cursor, framer and fates, without its tasks and sockets, and the client behind it."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from gateway.log.cursor import (
    Departure,
    Fate,
    Item,
    LogCursor,
    LogFacts,
    Restarted,
    Retention,
    fate_of,
)
from gateway.log.framing import EventId, FramedEncoder, Framer, Payload
from gateway.log.visiting import visit
from shared.errors import WarrenError
from shared.log import LogReader, Relay, Send, TokenChain
from shared.messages import (
    Accepted,
    Failed,
    Finished,
    PromptScores,
    Release,
    Restored,
    Started,
    TokenDelta,
)
from tests.shared.log.simulation.broker import Broker
from tests.shared.log.simulation.model import Model

_FRAME = re.compile(rb"id: (\S+)\ndata: (.+)\n\n")


class Said(msgspec.Struct, frozen=True):
    """A payload: an event, and all that its choice's text has been by then."""

    event: TokenDelta | Finished | Failed
    text: str


_DECODER = msgspec.json.Decoder(Said)


@dataclass
class Client:
    """Collects the events of a stream, and the id of the last event."""

    model: Model
    last_id: str = ""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    num_finished: int = 0
    failure: str | None = None

    @property
    def is_done(self) -> bool:
        return self.failure is not None or self.num_finished == self.model.num_choices

    def receive(self, frame: tuple[bytes, bytes]) -> None:
        assert not self.is_done, "something after the end"
        event_id, data = frame
        said = _DECODER.decode(data)
        self.last_id = event_id.decode()
        match said.event:
            case Failed(code=code):
                self.failure = code
            case TokenDelta() as event:
                self._extend(event)
            case Finished() as event:
                self._extend(event)
                assert len(self.tokens[event.choice]) == self.model.length
                self.num_finished += 1
        if not isinstance(said.event, Failed):
            assert said.text == self.texts[said.event.choice], "the renderer says something else"

    def _extend(self, event: TokenDelta | Finished) -> None:
        tokens = self.tokens.setdefault(event.choice, [])
        assert event.index == len(tokens), f"token {event.index} after {len(tokens)}"
        tokens.extend(event.token_ids)
        text = self.texts[event.choice] = self.texts.get(event.choice, "") + event.text
        self.model.check(tokens)
        assert text == self.model.text(tokens)


class Renderer:
    """Says each event, and the whole text before it: a function of the log from its start."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._ended: set[int] = set()

    def on_start(self, event: Started) -> list[Payload]:
        return []

    def on_scores(self, event: PromptScores) -> list[Payload]:
        return []

    def on_tokens(self, event: TokenDelta) -> list[Payload]:
        return self._go_on(event)

    def on_finish(self, event: Finished) -> list[Payload]:
        said = self._go_on(event)
        self._ended.add(event.choice)
        return said

    def on_failure(self, event: Failed) -> list[Payload]:
        return [_said(event, "")]

    def _go_on(self, event: TokenDelta | Finished) -> list[Payload]:
        assert event.choice not in self._ended, "a choice goes on after its end"
        self._texts[event.choice] = self._texts.get(event.choice, "") + event.text
        return [_said(event, self._texts[event.choice])]

    def end(self, receipt: str | None = None) -> list[Payload]:
        return []

    def fail(self, error: WarrenError) -> list[Payload]:
        raise AssertionError(error)


def _said(event: TokenDelta | Finished | Failed, text: str) -> Payload:
    return Payload(msgspec.json.encode(Said(event, text)))


class Cursor(LogCursor):
    """Reads by the model's rules, which a test may have weakened."""

    def __init__(self, model: Model) -> None:
        self._model = model
        super().__init__(Release(request_id="r", reader="g"), LogFacts())

    def _new_reader(self) -> LogReader:
        return self._model.reader_class(
            "r", self._model.num_choices, self._cut_off, is_renewed=self._is_renewed
        )


class Connection:
    """What a client is sent, from the position that it asks for."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._framer = Framer(EventId.parse(client.last_id))
        self._encoder = FramedEncoder(self._framer, Renderer())
        self._under_way: deque[tuple[bytes, bytes]] = deque()

    def give(self, item: Item) -> None:
        if isinstance(item, Restarted):
            self._encoder = FramedEncoder(self._framer, Renderer())
            self._framer.restart()
        else:
            self._under_way += _FRAME.findall(visit(item, self._encoder))

    def moves(self) -> list[Callable[[], None]]:
        return [self._deliver] if self._under_way else []

    def _deliver(self) -> None:
        self.client.receive(self._under_way.popleft())


class Outlet(Protocol):
    """Where what is read of a log goes."""

    retention: Retention
    """For how long the log is kept after its end."""

    @property
    def has_received(self) -> bool:
        """Whether anything was read before."""

    @property
    def has_all(self) -> bool:
        """Whether nothing more is needed of the log."""

    def give(self, item: Item, cursor: LogCursor) -> None:
        """Take what ``cursor`` has read next."""

    def moves(self) -> list[Callable[[], None]]:
        """What can be done with it."""


class OneClient:
    """A stream's only client."""

    def __init__(self, client: Client) -> None:
        self.retention = Retention.KEPT if client.model.is_kept else Retention.NONE
        self._connection = Connection(client)
        self._client = client

    @property
    def has_received(self) -> bool:
        return bool(self._client.last_id)

    @property
    def has_all(self) -> bool:
        return self._client.is_done

    def give(self, item: Item, cursor: LogCursor) -> None:
        self._connection.give(item)

    def moves(self) -> list[Callable[[], None]]:
        return self._connection.moves()


class Gateway:
    """Reads the log for clients."""

    def __init__(
        self, broker: Broker, model: Model, outlet: Outlet, *, is_away: bool = False
    ) -> None:
        self.is_away = is_away
        """Whether no client has asked it for the stream yet."""
        self._broker = broker
        self._model = model
        self._outlet = outlet
        self._cursor = Cursor(model)
        self._num_read = 0
        self._has_read_all = not (outlet.has_received or model.has_left_job)
        """Whether this has read everything that another gateway has relayed to a client, and that
        the request was accepted."""
        self._num_of_others = 0
        """The number of events that must be read for that."""
        self._has_lost_log = False
        self._has_left = False
        """Whether it has left the log, which is kept."""
        self._copy: Restored | None = None
        self._is_copy_sent = False

    @property
    def is_attached(self) -> bool:
        return self._broker.reader is self

    def moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        if self.is_away:
            return moves
        moves += self._outlet.moves()
        if self._broker.log is None or self._has_left:
            return moves
        if self._broker.is_down:
            return [*moves, self._begin_log_again] if self._has_lost_log else moves
        if not self.is_attached:
            return moves if self._broker.reader is not None else [*moves, self.attach]
        if self._copy is not None and not self._is_copy_sent:
            moves.append(self._send_copy)
        if self._num_read < len(self._broker.log):
            moves.append(self._read)
        if self._outlet.has_all:
            moves.append(self._end)
        return moves

    @property
    def publication(self) -> int:
        return self._cursor.publication

    @property
    def num_tokens(self) -> int:
        """The tokens that count, as far as the log was read."""
        return self._cursor.reader.num_tokens

    @property
    def is_deserted(self) -> bool:
        return self.is_attached and self._cursor.is_deserted and not self._copy

    @property
    def has_only_copy(self) -> bool:
        """Whether the nodes of the log and of its successor are down, so that nobody else has what
        was read."""
        return self._broker.is_down and self._copy is not None and not self._is_copy_sent

    def lose_log(self) -> None:
        """The node of the log dies while this reads it."""
        self._has_lost_log = self._has_read_all
        self._broker.is_down = True
        self._broker.reader = None

    def leave(self) -> None:
        """Stop reading; nothing is acknowledged, and what was sent arrives."""
        if self.is_attached and self._copy is not None and not self._is_copy_sent:
            self._send_copy()
        if self.is_attached:
            self._broker.reader = None

    def cut_off(self) -> None:
        """The broker is gone, and may forget what it has delivered."""
        self._cursor.cut_off()
        self.leave()

    def attach(self) -> None:
        self._broker.reader = self
        assert self._broker.log is not None
        self._num_of_others = len(self._broker.log)
        self._has_lost_log = self._is_copy_sent = False
        self._cursor.begin(is_renewed=self._broker.num_renewals > 0)
        self._num_read = 0

    def _begin_log_again(self) -> None:
        self._cursor.cut_off()
        self._copy = self._copy or self._cursor.restored()
        self._broker.begin_log_again()
        self.attach()

    def _send_copy(self) -> None:
        assert self._copy is not None
        self._broker.append(self._copy)
        self._is_copy_sent = True

    def _read(self) -> None:
        assert self._broker.log is not None
        event = self._broker.log[self._num_read]
        self._num_read += 1
        is_accepted = isinstance(event, Accepted) or self._cursor.reader.execution != 0
        if is_accepted or not self._model.has_left_job:
            self._has_read_all |= self._num_read >= self._num_of_others
        for action in self._cursor.read(event):
            match action:
                case Send():
                    self._broker.send(action)
                case Restarted():
                    self._outlet.give(action, self._cursor)
                case Relay():
                    self._outlet.give(action.event, self._cursor)
        if not self._cursor.is_waiting:
            self._copy = None

    def read_all(self) -> list[TokenChain]:
        """Take the log over, read it as far as it is written, and leave it; returns the tokens that
        count."""
        if self._broker.log is not None and not self._broker.is_down:
            self.attach()
            while self._num_read < len(self._broker.log):
                self._read()
            self.leave()
        return self._cursor.reader.chains

    def _end(self) -> None:
        """The clients have all of it."""
        if fate_of(Departure.SERVED, self._cursor.end, self._outlet.retention) is Fate.STAYS:
            self._has_left = True
            return self.leave()
        for send in self._cursor.cancel():
            self._broker.send(send)
        self.leave()
        self._broker.log = None
        return None


class Front(Protocol):
    """The gateways of a request, and its clients."""

    clients: list[Client]

    @property
    def is_away(self) -> bool:
        """Whether a client has yet to return."""

    @property
    def is_attached(self) -> bool:
        """Whether a gateway reads the log."""

    @property
    def is_deserted(self) -> bool:
        """Whether the job has to be published again."""

    @property
    def publication(self) -> int:
        """The newest publication that is known."""

    @property
    def num_tokens(self) -> int:
        """The tokens that count, as far as the log was read."""

    def moves(self) -> list[Callable[[], None]]:
        """All that could be done next."""

    def faults(self) -> list[Callable[[], object]]:
        """What may go wrong besides."""

    def come_back(self) -> None:
        """All clients return."""

    def lose_log(self) -> None:
        """The node of the log dies while it is read."""

    def lose_gateway(self, *, is_away: bool) -> None:
        """A gateway is lost with everything that is under way. Its clients connect through another
        gateway, maybe later (``is_away``)."""

    def read_chains(self, model: Model) -> Sequence[TokenChain]:
        """Read the log at a gateway that serves another request, by the rules of ``model``. Nothing
        is read where nobody else has the log."""

    def cut_off(self) -> None:
        """The broker is gone, and may forget what it has delivered."""


class Passer:
    """A request that only needs the tokens of the log."""

    retention = Retention.KEPT
    has_received = False
    has_all = False

    def give(self, item: Item, cursor: LogCursor) -> None:
        pass

    def moves(self) -> list[Callable[[], None]]:
        return []


class OwnFront:
    """The gateways of a request with a single client."""

    def __init__(self, broker: Broker, model: Model) -> None:
        self._broker = broker
        self._model = model
        self.clients = [Client(model)]
        self._gateway = self._new_gateway()

    def _new_gateway(self, *, is_away: bool = False) -> Gateway:
        outlet = OneClient(self.clients[0])
        return Gateway(self._broker, self._model, outlet, is_away=is_away)

    @property
    def is_away(self) -> bool:
        return self._gateway.is_away

    @property
    def is_attached(self) -> bool:
        return self._gateway.is_attached

    @property
    def is_deserted(self) -> bool:
        return self._gateway.is_deserted

    @property
    def publication(self) -> int:
        return self._gateway.publication

    @property
    def num_tokens(self) -> int:
        return self._gateway.num_tokens

    def moves(self) -> list[Callable[[], None]]:
        return self._gateway.moves()

    def faults(self) -> list[Callable[[], object]]:
        return []

    def come_back(self) -> None:
        self._gateway.is_away = False

    def lose_log(self) -> None:
        self._gateway.lose_log()

    def lose_gateway(self, *, is_away: bool) -> None:
        """Where nobody else has the log, the client would be told to wait for the nodes."""
        if not self._gateway.has_only_copy:
            self._gateway.leave()
            self._gateway = self._new_gateway(is_away=is_away)

    def read_chains(self, model: Model) -> Sequence[TokenChain]:
        if not self._broker.is_down:
            self.lose_gateway(is_away=False)
        reader = Gateway(self._broker, model, Passer())
        return reader.read_all()

    def cut_off(self) -> None:
        self._gateway.cut_off()

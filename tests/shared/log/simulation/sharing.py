"""Gateways whose clients share an execution: `gateway.once` without its tasks and sockets.

A gateway reads the log, or the copy of another gateway. Clients come at the start, in the middle or
after the end, leave, and return to any gateway.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from gateway.log.cursor import Item, LogCursor, Restarted, Retention
from gateway.once.copies import Copy, CopyWriter
from gateway.once.playback import Playback, PlaybackPlace
from shared.log import TokenChain
from shared.messages import Failed, ReplyEvent, Restored, Started
from tests.shared.log.simulation.broker import Broker
from tests.shared.log.simulation.gateway import Client, Connection, Cursor, Gateway, Passer
from tests.shared.log.simulation.model import Model

_NUM_HOSTS = 2
_MAX_CLIENTS = 4
_AWAY_SHARE = 0.3
"""Of the clients that leave, those that return last."""


class Listener:
    """A client at a gateway."""

    def __init__(self, client: Client, playback: Playback) -> None:
        self.client = client
        self._connection = Connection(client)
        self._playback = playback
        self._place = PlaybackPlace(playback)
        self._seen = (0, 0)

    def moves(self) -> list[Callable[[], None]]:
        moves = self._connection.moves()
        return [*moves, self._relay] if self._there != self._seen else moves

    @property
    def _there(self) -> tuple[int, int]:
        return self._playback.reading, len(self._playback.events)

    def _relay(self) -> None:
        self._seen = self._there
        for item in self._place.take():
            self._connection.give(item)


class CopyQueue:
    """The queue of a gateway that reads a copy."""

    def __init__(self, model: Model, playback: Playback) -> None:
        self.messages: deque[ReplyEvent] = deque()
        self._copy = Copy(playback, partial(Cursor, model))

    def read(self) -> None:
        self._copy.read(self.messages.popleft())


class SentCopy:
    """The copy that a gateway sends to another gateway."""

    def __init__(self, playback: Playback, writer_class: type[CopyWriter]) -> None:
        self._writer = writer_class(playback)
        self._under_way: deque[ReplyEvent] = deque()

    @property
    def has_ended(self) -> bool:
        """Whether everything was sent, to the end."""
        return self._writer.has_ended and not self._under_way

    def can_send(self) -> bool:
        if not self._under_way:
            self._under_way += self._writer.take()
        return bool(self._under_way)

    def send(self, queue: CopyQueue) -> None:
        queue.messages.append(self._under_way.popleft())


class Host:
    """A gateway with clients of the execution."""

    retention = Retention.KEPT

    def __init__(self, front: "SharedFront") -> None:
        self._front = front
        self._untaken: list[Item] = []
        """What was read of the log, and not added to the playback yet."""
        self._cursor: LogCursor | None = None
        self.listeners: list[Listener] = []
        self.playback = Playback()
        self.gateway: Gateway | None = None
        """What reads the log; None if this does not."""
        self.queue: CopyQueue | None = None
        """None if this reads no copy."""
        self.copies: dict[CopyQueue, SentCopy] = {}

    @property
    def is_reading(self) -> bool:
        return self.gateway is not None and not self.playback.is_complete

    @property
    def has_only_copy(self) -> bool:
        return self.gateway is not None and self.gateway.has_only_copy

    @property
    def has_received(self) -> bool:
        return bool(self._front.broker.log)

    @property
    def has_all(self) -> bool:
        return self.playback.is_complete

    def give(self, item: Item, cursor: LogCursor) -> None:
        if self.playback.is_complete:  # nothing more is taken
            return
        if isinstance(item, Restarted):
            self._untaken = []
        self._untaken.append(item)
        self._cursor = cursor

    def join(self, client: Client) -> None:
        """A client comes. What is complete and has no clients is forgotten."""
        if self.playback.is_complete and not self.listeners:
            if self.gateway is not None:
                self.gateway.leave()
            self.playback = Playback()
            self.gateway = self.queue = None
            if self._front.answer is not None:
                Copy(self.playback, partial(Cursor, client.model)).read(self._front.answer)
        self.listeners.append(Listener(client, self.playback))

    def moves(self) -> list[Callable[[], None]]:
        return [self._take] if self._untaken else []

    def _take(self) -> None:
        """Add what was read to the playback."""
        items, cursor, self._untaken = self._untaken, self._cursor, []
        if cursor is None or not items:
            return
        self.playback.add(items, cursor, is_complete=cursor.reader.is_ended)
        if self.playback.is_complete and not isinstance(items[-1], Failed):
            self._front.answer = cursor.restored()

    def all_moves(self) -> list[Callable[[], None]]:
        self.listeners = [one for one in self.listeners if not one.client.is_done]
        moves = [move for listener in self.listeners for move in listener.moves()]
        if self.gateway is not None:
            moves += self.gateway.moves()
        for queue, copy in list(self.copies.items()):
            has_arrived = copy.has_ended and not queue.messages
            if has_arrived or not self._front.is_read(queue):
                del self.copies[queue]
            elif copy.can_send():
                moves.append(partial(copy.send, queue))
        if self.queue is not None:
            moves += self._following_moves(self.queue)
        elif self.gateway is None and self.listeners and not self.playback.is_complete:
            moves += self._opening_moves()
        return moves

    def _following_moves(self, queue: CopyQueue) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = [self._hear] if queue.messages else []
        broker = self._front.broker
        reader = self._front.reader
        if self.playback.is_complete or broker.is_down:
            return moves
        if broker.reader is None:
            return [*moves, self._miss_reader]
        if reader is not None and queue not in reader.copies:
            moves.append(partial(reader.copy_to, queue))
        return moves

    def _opening_moves(self) -> list[Callable[[], None]]:
        is_held = any(host.has_only_copy for host in self._front.hosts)
        return [] if self._front.broker.is_down or is_held else [self._open]

    def _hear(self) -> None:
        queue = self.queue
        assert queue is not None
        queue.read()
        copies = (host.copies.get(queue) for host in self._front.hosts)
        if not queue.messages and any(copy is not None and copy.has_ended for copy in copies):
            assert self.playback.is_complete, "the copy lacks events"

    def _miss_reader(self) -> None:
        self.queue = None

    def _open(self) -> None:
        """Read the log in place of any other gateway."""
        self._front.displace_readers()
        self.playback.restart()
        self.gateway = Gateway(self._front.broker, self._front.model, self)
        self.gateway.attach()
        self._front.note_opened()

    def copy_to(self, queue: CopyQueue) -> None:
        self.copies[queue] = SentCopy(self.playback, self._front.model.writer_class)

    def displace(self) -> None:
        """Another gateway takes the log over."""
        if self.gateway is not None:
            self.gateway.leave()
            self.gateway = None
            self._take()
            if not self.playback.is_complete:
                self.copies.clear()
                self.queue = CopyQueue(self._front.model, self.playback)

    def lose_queue(self) -> None:
        """The connection to the broker breaks, and takes the queue of the copy with it."""
        if self.queue is not None and self._front.model.renews_copies:
            self.queue = CopyQueue(self._front.model, self.playback)
        elif self.queue is not None:
            self.queue.messages.clear()

    def cut_off(self) -> None:
        """As `lose_queue`, and what is under way to other gateways is lost."""
        self.copies.clear()
        self.lose_queue()
        if self.gateway is not None:
            self.gateway.cut_off()


class SharedFront:
    """The gateways of equal requests, and their clients."""

    def __init__(
        self,
        broker: Broker,
        model: Model,
        dice: random.Random,
        publish: Callable[[], object],
    ) -> None:
        """``publish`` publishes the job again."""
        self.broker = broker
        self.model = model
        self.answer: Restored | None = None
        """The stored answer."""
        self._dice = dice
        self._publish = publish
        self._num_opened = 0
        self.hosts = [Host(self) for _ in range(_NUM_HOSTS)]
        self.clients = [Client(model) for _ in range(dice.randint(2, _MAX_CLIENTS))]
        self._coming = self.clients[1:]
        """The clients that may come at any time."""
        self._away: list[Client] = []
        """The clients that come once nothing else happens."""
        self.hosts[0].join(self.clients[0])

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    @property
    def reader(self) -> Host | None:
        """The gateway that reads the log."""
        return next((host for host in self.hosts if host.is_reading), None)

    @property
    def is_attached(self) -> bool:
        return any(gateway.is_attached for gateway in self._gateways)

    @property
    def is_deserted(self) -> bool:
        return any(gateway.is_deserted for gateway in self._gateways)

    @property
    def publication(self) -> int:
        return max((gateway.publication for gateway in self._gateways), default=0)

    @property
    def num_tokens(self) -> int:
        attached = (gateway for gateway in self._gateways if gateway.is_attached)
        return next((gateway.num_tokens for gateway in attached), 0)

    @property
    def _gateways(self) -> list[Gateway]:
        return [host.gateway for host in self.hosts if host.gateway is not None]

    def is_read(self, queue: CopyQueue) -> bool:
        """Whether a gateway still reads the copy."""
        return any(host.queue is queue for host in self.hosts)

    def displace_readers(self) -> None:
        for host in self.hosts:
            host.displace()

    def note_opened(self) -> None:
        """A gateway has opened the log. If no worker has begun, it publishes the job, too."""
        self._num_opened += 1
        log = self.broker.log or []
        if self._num_opened > 1 and not any(isinstance(one, Started | Restored) for one in log):
            self._publish()

    def moves(self) -> list[Callable[[], None]]:
        moves = [move for host in self.hosts for move in host.all_moves()]
        return [*moves, self._come] if self._coming else moves

    def faults(self) -> list[Callable[[], object]]:
        """What may happen to the clients and the copies."""
        return [self._leave, self._leave, lambda: self._dice.choice(self.hosts).lose_queue()]

    def come_back(self) -> None:
        self._coming += self._away
        self._away = []

    def lose_log(self) -> None:
        for gateway in self._gateways:
            if gateway.is_attached:
                gateway.lose_log()

    def lose_gateway(self, *, is_away: bool) -> None:
        place = self._dice.randrange(len(self.hosts))
        host = self.hosts[place]
        if host.has_only_copy:
            return
        if host.gateway is not None:
            host.gateway.leave()
        gone = [one.client for one in host.listeners if not one.client.is_done]
        self.hosts[place] = Host(self)
        if is_away:
            self._away += gone
        else:
            self._coming += gone

    def read_chains(self, model: Model) -> Sequence[TokenChain]:
        if not self.broker.is_down:
            self.displace_readers()
        return Gateway(self.broker, model, Passer()).read_all()

    def cut_off(self) -> None:
        for host in self.hosts:
            host.cut_off()

    def _come(self) -> None:
        client = self._coming.pop(self._dice.randrange(len(self._coming)))
        self._dice.choice(self.hosts).join(client)

    def _leave(self) -> None:
        """A client leaves, and returns."""
        host = self._dice.choice(self.hosts)
        if host.listeners:
            leaving = host.listeners.pop(self._dice.randrange(len(host.listeners)))
            is_away = self._dice.random() < _AWAY_SHARE
            (self._away if is_away else self._coming).append(leaving.client)

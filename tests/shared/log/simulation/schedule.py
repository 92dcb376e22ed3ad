"""A schedule: each move is drawn from its seed, including a limited number of faults."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from shared.log import LogReader
from shared.log.writer import MAX_CRASHES
from shared.messages import Accepted, Hedge
from tests.shared.log.simulation.broker import Broker, Job
from tests.shared.log.simulation.gateway import Client, Front, OwnFront
from tests.shared.log.simulation.model import NUMERICS, Model
from tests.shared.log.simulation.process import NUM_CACHED, Crash, Process
from tests.shared.log.simulation.sharing import SharedFront

_NUM_WORKERS = 3
_MAX_FAULTS = 12
_FAULT_SHARE = 0.08
_MAX_STEPS = 5000
_MAX_PUBLICATIONS = 3
_MAX_HEDGES = 3
_RIGHTLY_SHARE = 0.5
"""How often a hedged worker stands still."""


class Schedule:
    """Runs a request to its end. Raises `AssertionError` if a promise is broken."""

    def __init__(self, seed: int, model: Model, num_faults: int | None = None) -> None:
        self._dice = random.Random(seed)
        self._model = model
        self._broker = Broker(side_dice=random.Random(seed))
        if model.has_left_job:
            self._broker.jobs = [Job(is_left=True)]
        self._front = self._new_front()
        self._workers: list[Process] = []
        self._num_born = 0
        self._num_published = 1
        self._num_hedges = 0
        self._num_skipped = 0
        """The publication numbers of hedges, and between them."""
        self._is_accepted = not model.has_left_job
        drawn = self._dice.randint(0, _MAX_FAULTS)
        self._num_faults = drawn if num_faults is None else num_faults
        self.num_crashes = 0
        self._num_losses = 0
        """How often a worker may wrongly be considered dead."""
        for k in range(_NUM_WORKERS):
            self._bear(NUMERICS[k % 2] if model.is_mixed else "")
        if model.has_affinity_target:
            self._broker.jobs[0].affinity_target = self._workers[0].name

    def _new_front(self) -> Front:
        if not self._model.is_shared:
            return OwnFront(self._broker, self._model)
        return SharedFront(self._broker, self._model, self._dice, self._publish_unstarted)

    def advance(self, max_steps: int) -> None:
        """Run the request for so many steps, or to its end."""
        for _ in range(max_steps):
            if self._num_faults and self._dice.random() < _FAULT_SHARE:
                self._num_faults -= 1
                self._dice.choice(self._faults())()
            elif moves := self._moves():
                self._move(self._dice.choice(moves))
            elif self._heal():
                continue
            else:
                break

    def read_tokens(self, choice: int, reader_class: type[LogReader]) -> tuple[int, ...]:
        """The tokens of a choice so far, for a gateway that takes the log over from its reader; no
        tokens if the log cannot be read now."""
        reading = replace(self._model, reader_class=reader_class)
        return tuple(self._front.read_chains(reading)[choice].token_ids)

    @property
    def num_renewals(self) -> int:
        """How often the log was recreated."""
        return self._broker.num_renewals

    def num_heard(self, choice: int) -> int:
        """The tokens of a choice that a client has."""
        return max(len(client.tokens.get(choice, [])) for client in self._front.clients)

    def has_said(self, choice: int, token_ids: Sequence[int]) -> bool:
        """Whether the answer begins with these tokens."""
        said = self._client.tokens.get(choice, [])
        return tuple(said[: len(token_ids)]) == tuple(token_ids)

    def run(self) -> None:
        self.advance(_MAX_STEPS)
        assert self._is_done, "a stream does not end"
        self._check_clients()
        if self._model.deadly_at is not None:
            assert self._client.failure == "worker_lost", "it should have killed its worker"
        expected = {None, "worker_lost", *["deadline_exceeded"] * (self._model.expiry_share > 0)}
        assert self._client.failure in expected, f"it fails with {self._client.failure}"
        if self._client.failure == "worker_lost" and not self._broker.copied:
            has_strict_suspects = self._model.requires_same_numerics
            assert self._num_losses >= MAX_CRASHES + (not has_strict_suspects), "innocent"
        assert not self._broker.jobs, "a job is left"
        assert not any(worker.deliveries for worker in self._workers), "a worker still works"
        self._check_record()

    @property
    def _client(self) -> Client:
        return self._front.clients[0]

    @property
    def _is_done(self) -> bool:
        return all(client.is_done for client in self._front.clients)

    def _check_clients(self) -> None:
        """All clients have the same. After a failure the log may be lost with its node, and the
        clients that had not read so far get an answer."""
        if not self._model.is_cluster:
            failures = {client.failure for client in self._front.clients}
            assert len(failures) == 1, f"clients hear different ends: {failures}"
        answers = [one.tokens for one in self._front.clients if one.failure is None]
        assert all(one == answers[0] for one in answers), "a client has another answer"

    def _check_record(self) -> None:
        """The request is recorded, and if it is answered, as what the client has. A run that fails
        before it knows its position in the log does not know the number of tokens."""
        record = self._broker.record
        assert record is not None, "the request is not recorded"
        if self._client.failure is None:
            num_tokens = sum(map(len, self._client.tokens.values()))
            recorded = (record.num_prompt_tokens, record.num_cached_tokens)
            assert record.outcome == "completed", f"recorded as {record.outcome}"
            assert recorded == (1, NUM_CACHED), f"recorded prompt: {recorded}"
            assert record.num_output_tokens == num_tokens, (
                f"{record.num_output_tokens} of {num_tokens} tokens recorded"
            )

    def _moves(self) -> list[tuple[Process | None, Callable[[], None]]]:
        moves: list[tuple[Process | None, Callable[[], None]]] = [
            (worker, move) for worker in self._workers for move in worker.moves()
        ]
        if not self._is_accepted:
            moves.append((None, self._accept))
        return moves + [(None, move) for move in self._front.moves()]

    def _accept(self) -> None:
        """The request is accepted in the log that was declared for it, and its job published."""
        self._is_accepted = True
        execution = self._model.execution_of(is_left=False)
        self._broker.append(Accepted(body_hash="h", execution=execution))
        self._broker.jobs.append(Job())

    def _move(self, chosen: tuple[Process | None, Callable[[], None]]) -> None:
        worker, move = chosen
        try:
            move()
        except Crash:
            assert worker is not None
            self.num_crashes += 1
            self._kill(worker)

    def _heal(self) -> bool:
        """The last moves: stalled workers are considered dead and wake, and the client returns."""
        if self._broker.is_down:
            self._return_node()
            return True
        asleep = [worker for worker in self._workers if worker.is_paused]
        for worker in asleep:
            self._cut_off(worker)
            worker.is_paused = False
        if not asleep and self._broker.expire():
            return True
        if not asleep and self._front.is_deserted and not self._broker.jobs:
            return self._publish_again()
        if asleep or not self._front.is_away:
            return bool(asleep)
        assert not any(worker.deliveries for worker in self._workers), (
            "a worker waits for the client"
        )
        self._front.come_back()
        return True

    def _faults(self) -> list[Callable[[], object]]:
        worker = self._dice.choice(self._workers)
        of_nodes = [self._lose_log, self._return_node] if self._model.is_cluster else []
        can_expire = self._model.is_mixed or self._model.has_affinity_target
        of_time = [self._broker.expire] if can_expire else []
        of_hedges = [self._hedge] * 3 if self._model.is_hedged else []
        return [
            *of_nodes,
            *of_time,
            *of_hedges,
            *self._front.faults(),
            lambda: self._kill(worker),
            lambda: self._pause(worker),
            lambda: self._wake(worker),
            lambda: self._cut_off(worker),
            lambda: self._cut_off(worker, is_counted=False),
            worker.drain,
            worker.repeat,
            lambda: self._stumble(worker),
            worker.miss_commands,
            self._republish,
            self._lose_gateway,
            lambda: self._lose_gateway(is_away=True),
            self._restart_broker,
            lambda: self._kill_with_gateway(worker),
        ]

    def _bear(self, numerics: str) -> None:
        self._num_born += 1
        name = f"worker.{self._num_born}"
        self._workers.append(Process(name, self._broker, self._model, self._dice, numerics))

    def _kill(self, worker: Process) -> None:
        self._num_losses += 1
        worker.die()
        self._workers.remove(worker)
        self._bear(worker.numerics)

    def _kill_with_gateway(self, worker: Process) -> None:
        self._kill(worker)
        self._lose_gateway(is_away=True)

    def _cut_off(self, worker: Process, *, is_counted: bool = True) -> None:
        self._num_losses += 1
        worker.cut_off(is_counted=is_counted)

    def _stumble(self, worker: Process) -> None:
        self._num_losses += 1
        worker.stumble()

    def _pause(self, worker: Process) -> None:
        worker.is_paused = True

    def _wake(self, worker: Process) -> None:
        worker.is_paused = False

    def _republish(self) -> None:
        """A gateway's stall timer fires, rightly or not."""
        self._num_losses += 1
        num_published = self._num_published - self._num_skipped
        may_publish = self._is_accepted and num_published < _MAX_PUBLICATIONS
        if may_publish and not self._is_done:
            self._publish_again()

    def _publish_unstarted(self) -> None:
        """Another gateway opens the log, and finds no worker in it."""
        if self._is_accepted:
            self._num_losses += 1
            self._publish_again()

    def _publish_again(self) -> bool:
        publication = max(self._num_published, self._front.publication + 1)
        self._broker.jobs.append(Job(publication, num_renewals=self._broker.num_renewals))
        self._num_published = publication + 1
        return True

    def _hedge(self) -> None:
        """A gateway takes the current run for slow, rightly or not."""
        busy = [worker for worker in self._workers if worker.deliveries]
        if busy and self._dice.random() < _RIGHTLY_SHARE:
            self._pause(self._dice.choice(busy))
        may_hedge = self._front.is_attached and self._is_accepted
        if may_hedge and self._num_hedges < _MAX_HEDGES and not self._is_done:
            self._num_hedges += 1
            publication = max(self._num_published, self._front.publication + 1) + 1
            hedge = Hedge(number=publication, num_tokens=self._front.num_tokens)
            again = Job(publication, num_renewals=self._broker.num_renewals, hedge=hedge)
            self._broker.jobs.append(again)
            self._num_skipped += publication + 2 - self._num_published
            self._num_published = publication + 2

    def _lose_log(self) -> None:
        """The node that keeps the log dies, maybe for good."""
        if self._front.is_attached and self._is_accepted:
            self._front.lose_log()

    def _return_node(self) -> None:
        self._broker.is_down = False
        self._broker.is_back = self._broker.num_renewals > 0

    def _lose_gateway(self, *, is_away: bool = False) -> None:
        self._front.lose_gateway(is_away=is_away)

    def _restart_broker(self) -> None:
        if self._model.is_seeded:
            unconfirmed = [event for worker in self._workers for event in worker.unconfirmed]
            self._broker.forget(unconfirmed)
        for worker in self._workers:
            self._cut_off(worker)
        self._front.cut_off()
        self._broker.restart()

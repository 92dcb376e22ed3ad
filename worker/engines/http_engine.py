"""The engine over HTTP: one request for each running sequence, and a look at the server every
second."""

import asyncio
import logging
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from shared.backoff import Backoff
from shared.errors import (
    ContextLengthExceeded,
    EngineFailed,
    InternalError,
    InvalidRequest,
    WarrenError,
)
from shared.telemetry import incidents
from worker.engine.charges import SharedTime
from worker.engine.interface import (
    CancelSequence,
    EngineCommand,
    EngineListener,
    EngineLoad,
    Output,
    Promote,
    SequenceFailed,
    SequenceId,
    Submit,
)
from worker.engine.shares import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, Shares
from worker.engine.step_times import StepTimes
from worker.engines.adapter import Adapter, Ask, EngineContent, piece_of
from worker.engines.answer import EngineAway, EngineBusy
from worker.engines.child import EngineProcess
from worker.engines.remote_sequence import RemoteSequence
from worker.engines.server import EngineServer
from worker.text import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_INTERVAL_S = 1.0
_BUSY_LOOK_INTERVAL_S = 10.0
"""After a look that the server answered with 429."""
_MAX_MISSED_LOOKS = 2
"""Looks in succession that a server may leave unanswered: a connection may be lost by chance."""
_MAX_MISSED_AS_CHILD = 20
"""Looks in succession that a child leaves unanswered before it is ended and started again. A child
that has not answered yet is loading its model, which may take any time."""
_GATHER_S = 0.002
"""How long the loop waits after the first token of a step for the tokens of other sequences."""
_BUSY_PAUSE_S = 0.1
_MAX_BUSY_PAUSE_S = 2.0


class HttpEngine:
    """A `TokenEngine` whose tokens a server computes.

    When the server ends or hangs, every sequence that was running there fails with `EngineFailed`.
    Sequences that had not begun wait until the server is back.
    """

    def __init__(
        self,
        server: EngineServer,
        adapter: Adapter,
        tokenizer: Tokenizer,
        *,
        max_seq_len: int,
        max_num_seqs: int,
        batch_reserve: int,
        tenant_weights: Mapping[str, float],
        recheck: Callable[[], object],
        process: EngineProcess | None,
    ) -> None:
        """``recheck`` raises `WarrenError` if the server, which was away, serves another model now.
        ``process`` is the server's, if it is the worker's child."""
        self.step_times = StepTimes()
        self.stalled_s = 0.0
        """A server that hangs is no reason to end this process: see `EngineServer`."""
        self._server = server
        self._adapter = adapter
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len
        self._max_num_seqs = max_num_seqs
        self._max_num_batch = max(1, max_num_seqs - batch_reserve)
        self._shares = Shares(tenant_weights)
        self._recheck = recheck
        self._process = process
        self._waiting: dict[SequenceId, RemoteSequence] = {}
        self._running: dict[SequenceId, tuple[RemoteSequence, asyncio.Task[None]]] = {}
        self._num_submitted = 0
        self._failures: Counter[str] = Counter()
        self._is_ready = True
        self._is_known = asyncio.Event()
        """The server is still the server that was checked, as far as is known."""
        self._is_known.set()
        self._num_doubts = 0
        self._num_exits = 0 if process is None else process.num_exits
        self._unfit_reason = ""
        self._outputs: list[Output] = []
        self._time = SharedTime[SequenceId](time.monotonic)
        """The requests of all sequences share it: which of them the server works on at a moment is
        unknown."""
        self._load = self._new_load()
        self._loop = asyncio.SelectorEventLoop(_GatheringSelector())
        self._stopping = asyncio.Event()
        self._looks = asyncio.Event()
        """Set to look at the server at once."""
        self._thread: threading.Thread | None = None

    def start(self, listener: EngineListener) -> None:
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        else:
            self._loop.close()
        self._server.close()
        if self._process is not None:
            self._process.stop()

    def send(self, command: EngineCommand) -> None:
        if isinstance(command, Submit):
            self._check(command)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._obey, command)

    def load(self) -> EngineLoad:
        return self._load

    def _check(self, submit: Submit) -> None:
        if len(submit.prompt_ids) + submit.max_tokens > self._max_seq_len:
            raise ContextLengthExceeded(
                f"{len(submit.prompt_ids)} tokens in the prompt and {submit.max_tokens} in the "
                f"completion exceed the {self._max_seq_len} that fit"
            )
        is_only_scored = submit.scores_prompt and not submit.max_tokens and not submit.output_ids
        if submit.max_tokens <= len(submit.output_ids) and not is_only_scored:
            raise ValueError(
                f"max_tokens is {submit.max_tokens} and {len(submit.output_ids)} are there already"
            )

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 (the process decides how to react)
            self._listener.hear_failure(error)

    async def _serve(self) -> None:
        watching = asyncio.create_task(self._watch())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([watching, stopping], return_when=asyncio.FIRST_COMPLETED)
        tasks = [task for _, task in self._running.values()]
        for task in [watching, stopping, *tasks]:
            task.cancel()
        await asyncio.wait([watching, stopping, *tasks])
        if not self._stopping.is_set():
            watching.result()

    def _obey(self, command: EngineCommand) -> None:
        match command:
            case Submit():
                sequence = RemoteSequence(
                    command,
                    self._adapter.traits,
                    vocab_size=self._tokenizer.vocab_size,
                    arrival=self._num_submitted,
                )
                self._num_submitted += 1
                self._waiting[command.sequence_id] = sequence
                self._shares.enter(command.tenant)
            case CancelSequence(sequence_id):
                if sequence_id in self._running:
                    self._running[sequence_id][1].cancel()
                self._leave(sequence_id)
            case Promote(sequence_id):
                if sequence_id in self._waiting:
                    self._waiting[sequence_id].is_batch = False
                elif sequence_id in self._running:
                    self._running[sequence_id][0].is_batch = False
        self._fill()

    def _fill(self) -> None:
        """Start sequences as long as the engine has slots for them: interactive sequences first,
        and in each class the tenant that was served least."""
        while self._can_begin() and self._waiting and len(self._running) < self._max_num_seqs:
            sequence = min(self._waiting.values(), key=self._turn)
            num_batch = sum(running.is_batch for running, _ in self._running.values())
            if sequence.is_batch and num_batch >= self._max_num_batch:
                break
            submit = sequence.submit
            del self._waiting[submit.sequence_id]
            self._shares.charge(submit.tenant, PROMPT_TOKEN_COST * len(submit.prompt_ids))
            task = self._loop.create_task(self._generate(sequence))
            self._running[submit.sequence_id] = sequence, task
        self._load = self._new_load()

    def _can_begin(self) -> bool:
        self._notice_exits()
        return self._is_ready and self._is_known.is_set()

    def _turn(self, sequence: RemoteSequence) -> tuple[bool, float, int]:
        counter = self._shares.counter(sequence.submit.tenant)
        return sequence.is_batch, counter, sequence.arrival

    def _leave(self, sequence_id: SequenceId) -> None:
        running = self._running.pop(sequence_id, None)
        sequence = self._waiting.pop(sequence_id, None) or (running and running[0])
        if sequence is not None:
            self._shares.leave(sequence.submit.tenant)

    async def _generate(self, sequence: RemoteSequence) -> None:
        """Run a sequence to its end; a failure of the engine or of the request ends it, too."""
        sequence_id = sequence.submit.sequence_id
        busy = Backoff(_BUSY_PAUSE_S, _MAX_BUSY_PAUSE_S)
        while True:
            try:
                await self._until_known()
                if await self._ask(sequence):
                    continue
            except EngineBusy as error:
                self._note("busy", sequence, error)
                busy.lasted()
                await asyncio.sleep(busy.pause_s)
                continue
            except EngineAway as error:
                self._note("unreachable", sequence, error)
                self._doubt()
                self._lose(str(error))
            except InvalidRequest as error:
                if sequence.withdraw_constraint():
                    self._note("refused_constraint", sequence, error)
                    continue
                self._note("refused", sequence, error)
                self._fail(sequence, error)
            except EngineFailed as error:
                self._note("failed", sequence, error)
                self._doubt()
                self._fail(sequence, error)
                self._looks.set()
            except Exception as error:  # noqa: BLE001 (a bug fails only this sequence)
                incidents.report("job", "sequence failed", error)
                self._fail(sequence, InternalError("The worker failed on this request."))
            else:
                self._leave(sequence_id)
            self._fill()
            return

    async def _ask(self, sequence: RemoteSequence) -> bool:
        """Make the next request of a sequence; returns whether another must follow."""
        ask = sequence.next_ask()
        if ask.is_decided:
            outputs, _ = sequence.take(EngineContent(ask.allowed_ids or ()))
            self._put(sequence, outputs)
            return not outputs or outputs[-1].finish_reason is None
        call = self._adapter.call(ask, self._tokenizer)
        sequence.is_at_work = True
        num_violations = sequence.num_violations
        began_at = time.monotonic()
        stream = self._server.events(call, self._max_prompt_len())
        goes_on, is_empty = True, True
        self._time.enter(sequence.submit.sequence_id)
        try:
            async for arrived in stream:
                now = time.monotonic()
                for event in arrived:
                    outputs, goes_on = sequence.take(piece_of(call, event))
                    is_empty = is_empty and not outputs
                    self.step_times.add((now - began_at) / len(arrived))
                    self._put(sequence, outputs)
                    if outputs and outputs[-1].finish_reason is not None:
                        return False
                    if not goes_on:
                        break
                began_at = now
                self._time.settle(sequence.submit.sequence_id)
                if not goes_on:
                    break
        finally:
            sequence.is_at_work = False
            self._time.leave(sequence.submit.sequence_id)
            await stream.aclose()
        if goes_on:
            raise EngineFailed("The engine's stream ended without an end.")
        if sequence.num_violations > num_violations:
            self._note_violation(sequence, ask)
        elif is_empty:
            raise EngineFailed("The engine ended the stream without a token.")
        return True

    def _put(self, sequence: RemoteSequence, outputs: Sequence[Output]) -> None:
        if not outputs:
            return
        self._shares.charge(sequence.submit.tenant, OUTPUT_TOKEN_COST * len(outputs))
        if not self._outputs:  # what other sequences receive in this turn of the loop joins it
            self._loop.call_soon(self._hand_out)
        self._outputs += outputs

    def _hand_out(self) -> None:
        outputs, self._outputs = self._outputs, []
        charges = self._time.take()
        if outputs or charges:
            self._listener.hear_outputs(outputs, charges)

    def _fail(self, sequence: RemoteSequence, error: WarrenError) -> None:
        self._hand_out()  # tokens come before the failure
        self._leave(sequence.submit.sequence_id)
        self._listener.hear_failed([SequenceFailed(sequence.submit.sequence_id, error)])

    def _note(self, kind: str, sequence: RemoteSequence, error: Exception) -> None:
        request_id, _, _ = sequence.submit.sequence_id.request_id.partition("/")
        facts = {"request_id": request_id, "num_tokens": len(sequence.output_ids)}
        self._report(kind, logging.WARNING, "engine failed a sequence", reason=str(error), **facts)

    def _note_violation(self, sequence: RemoteSequence, ask: Ask) -> None:
        if ask.constraint is not None or ask.allowed_ids is not None:
            error = EngineFailed("The engine drew a token that the constraint does not allow.")
            self._note("constraint", sequence, error)

    def _report(self, kind: str, level: int, event: str, **facts: object) -> None:
        """Log and count a failure."""
        self._failures[kind] += 1
        self._load = self._new_load()
        said = {"engine": self._adapter.traits.name, "kind": kind, **facts}
        logger.log(level, event, extra=said)

    def _max_prompt_len(self) -> int:
        """The tokens of the longest prompt that the server may be computing."""
        running = [sequence for sequence, _ in self._running.values()]
        return max(len(one.submit.prompt_ids) + len(one.output_ids) for one in running)

    async def _watch(self) -> None:
        """Look at the server every second: whether it answers, and after a doubt whether it is the
        same server."""
        num_missed = 0
        exits_before_answer = self._num_exits  # of children before the one that answered last
        interval_s = _LOOK_INTERVAL_S
        while True:
            with_haste = asyncio.create_task(self._looks.wait())
            await asyncio.wait([with_haste], timeout=interval_s)
            with_haste.cancel()
            self._looks.clear()
            self._time.settle_all()  # a request may be cancelled before its first token
            self._hand_out()
            self._notice_exits()
            num_exits = self._num_exits
            look = await _in_thread(partial(self._server.look, self._adapter.health_path))
            interval_s = _BUSY_LOOK_INTERVAL_S if look.is_busy else _LOOK_INTERVAL_S
            reason = look.reason
            if look.is_reconnected or not look.is_healthy:
                self._doubt()
            if look.is_healthy:
                exits_before_answer = num_exits
                reason = await self._verify()
            num_missed = num_missed + 1 if reason else 0
            if num_missed >= _MAX_MISSED_LOOKS:
                self._lose(reason)
                is_silent = num_missed % _MAX_MISSED_AS_CHILD == 0
                has_answered = exits_before_answer == self._num_exits
                if self._process is not None and is_silent and has_answered:
                    self._report("hung", logging.ERROR, "engine hangs, and is started again")
                    self._process.end()

    def _notice_exits(self) -> None:
        """A child process that has ended is another process now."""
        num_exits = 0 if self._process is None else self._process.num_exits
        if num_exits != self._num_exits:
            self._failures["ended"] += num_exits - self._num_exits  # its end has been logged
            self._num_exits = num_exits
            self._load = self._new_load()
            self._doubt()

    def _doubt(self) -> None:
        """The server may be another server now: no request begins before it was checked."""
        self._num_doubts += 1
        self._is_known.clear()

    async def _until_known(self) -> None:
        self._notice_exits()
        while not self._is_known.is_set():
            await self._is_known.wait()

    async def _verify(self) -> str:
        """After a doubt, check that a server that answers serves what it served before. Returns
        why it has not answered; empty if it has."""
        if self._can_begin():
            return ""
        num_doubts = self._num_doubts
        try:
            await _in_thread(self._recheck)
        except EngineAway as error:
            return str(error)
        except EngineBusy:  # it answers, and is asked again after the next look
            return ""
        except WarrenError as error:
            self._refuse(str(error))
        else:
            self._unfit_reason = ""
            self._notice_exits()
            if num_doubts == self._num_doubts:
                self._is_known.set()
                self._return()
        return ""

    def _refuse(self, reason: str) -> None:
        """The server serves something else. Said and counted once."""
        if reason != self._unfit_reason:
            event = "engine answers, and is not used"
            self._report("unfit", logging.ERROR, event, reason=reason)
        self._unfit_reason = reason
        self._leave_engine("The engine serves something else now.")

    def _lose(self, reason: str) -> None:
        if self._is_ready:
            facts = {"url": self._server.url, "reason": reason}
            self._report("away", logging.ERROR, "engine is away", **facts)
        self._leave_engine("The engine does not answer any more.")

    def _return(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            facts = {"engine": self._adapter.traits.name, "url": self._server.url}
            logger.info("engine is back", extra=facts)
            self._listener.hear_ready(is_ready=True)
        self._fill()

    def _leave_engine(self, reason: str) -> None:
        if not self._is_ready:
            return
        self._is_ready = False
        # The worker must not take a job again that fails here.
        self._listener.hear_ready(is_ready=False)
        for sequence_id, (sequence, task) in [*self._running.items()]:
            if task is not asyncio.current_task():
                task.cancel()
            if sequence.is_at_work:
                self._fail(sequence, EngineFailed(reason))
            else:
                del self._running[sequence_id]
                self._waiting[sequence_id] = sequence
        self._load = self._new_load()

    def _new_load(self) -> EngineLoad:
        running = [sequence.is_batch for sequence, _ in self._running.values()]
        waiting = [sequence.is_batch for sequence in self._waiting.values()]
        return EngineLoad(
            num_running=len(running),
            num_waiting=len(waiting),
            num_blocks=self._max_num_seqs,
            num_free_blocks=self._max_num_seqs - len(running),
            num_preemptions=0,
            num_running_batch=sum(running),
            num_waiting_batch=sum(waiting),
            num_failures=dict(self._failures),
        )


class _GatheringSelector(selectors.DefaultSelector):
    """Reports what becomes ready in the moment after the first event together with that event.

    A server sends the tokens of a step over many connections, one after another. Without the pause,
    each would wake this thread and the worker's, at the expense of a server on the same cores.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if not ready or timeout == 0:
            return ready
        time.sleep(_GATHER_S)
        return super().select(0)


async def _in_thread(work: Callable[[], T]) -> T:
    """The result of ``work``. Unlike `asyncio.to_thread`, its thread does not keep the process
    alive."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # it cannot be cancelled from now on

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised where it is awaited)
            result.set_exception(error)

    threading.Thread(target=run, name="engine question", daemon=True).start()
    return await asyncio.wrap_future(result)

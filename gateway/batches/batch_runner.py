"""Claims batches and runs them, from the check of the file to the output files."""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, closing, suppress
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from gateway.batches.bad_lines import BadInput
from gateway.batches.checking import Checked, check
from gateway.batches.key_limits import key_of
from gateway.batches.lines import InputLine, LineOutcome, input_lines, line_id, unexecuted_line
from gateway.batches.order import LineOrder, LinePlace
from gateway.batches.serving import LineServer
from gateway.batches.twins import TwinRole, Twins
from gateway.batches.windows import BatchMemory, Memory, Window
from gateway.store.batches import BatchEnding, BatchRecord, LeaseLost, LineAnswer
from gateway.store.state import StoredState
from gateway.wiring import Gateway
from shared.errors import InvalidRequest, NotFound, Unavailable
from shared.settings import DAY_S
from shared.telemetry import incidents

logger = logging.getLogger(__name__)

OUTPUT_PURPOSE = "batch_output"
_LOOK_INTERVAL_S = 1.0
_MIN_LOOK_INTERVAL_S = 0.2
"""However often batches are created and cancelled. Each look is several transactions."""
_RETRY_PAUSE_S = 0.5
_SWEEP_INTERVAL_S = 60.0
_MAX_EMBEDDINGS = 1
"""Embeddings wait for the only slot that `QuickLane` has for them."""
_NUM_WINDOWS = 2
"""Of each model: for lines that are computed, and for lines that repeat an answer."""
_LINES_AT_ONCE = 1000
_ANSWERS_AT_ONCE = 100
_MAX_WAITING_TWINS = 4096
"""Lines of a model that wait for the answers to equal lines; a few kilobytes each."""
_ANSWER_BYTES_AT_ONCE = 8 << 20

_Result = TypeVar("_Result")


class BatchRunner:
    """Runs batches at a gateway, beside its other work."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._runs: dict[str, tuple[_BatchRun, asyncio.Task[None]]] = {}
        self._memory = Memory(gateway.tuning.batch_lines_bytes)
        self._large_check = asyncio.Lock()

    async def run(self) -> None:
        """Run batches until cancelled. The jobs of their lines then go on, and another gateway may
        claim them at once."""
        store = self._gateway.store
        state = await store.wait_open()
        sweep = partial(_sweep, kept_s=self._gateway.settings.retention_days.files * DAY_S)
        keep_swept = partial(store.keep_swept, sweep, _SWEEP_INTERVAL_S)
        sweeping = asyncio.create_task(incidents.keep_running(keep_swept))
        try:
            while True:
                with suppress(Unavailable):
                    await self._claim(state)
                for run, _ in self._runs.values():
                    run.look()
                await _next_look(self._gateway.batches_changed)
        finally:
            tasks = [sweeping, *(task for _, task in self._runs.values())]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _claim(self, state: StoredState) -> None:
        """Claim as many batches as there is room for. Raises `Unavailable`."""
        tuning = self._gateway.tuning
        while len(self._runs) < tuning.max_batches + tuning.max_first_batches:
            running = {batch_id: run.batch.tenant for batch_id, (run, _) in self._runs.items()}
            is_full = len(self._runs) >= tuning.max_batches
            batch = await state.batches.claim(running, tuning.batch_lease_s, is_full=is_full)
            if batch is None:
                return
            run = _BatchRun(self._gateway, state, batch, self._memory, self._large_check)
            self._runs[batch.id] = run, asyncio.create_task(self._run(run))

    async def _run(self, run: "_BatchRun") -> None:
        batch = run.batch
        logger.info("batch claimed", extra={"batch": batch.id, "status": batch.status})
        try:
            with incidents.survived(
                "task", "batch abandoned until its lease expires", batch=batch.id
            ):
                await run.run()
        finally:
            del self._runs[batch.id]
            self._gateway.batches_changed.set()


class _BatchRun:
    """The run of a batch at a gateway, under its fencing token."""

    def __init__(
        self,
        gateway: Gateway,
        state: StoredState,
        batch: BatchRecord,
        memory: Memory,
        large_check: asyncio.Lock,
    ) -> None:
        self.batch = batch
        self._memory, self._large_check = memory, large_check
        self._gateway = gateway
        self._files, self._batches = state.files, state.batches
        self._answers: asyncio.Queue[tuple[LineAnswer, asyncio.Future[None]]] = asyncio.Queue()
        self._lines = LineServer(gateway, batch)
        self._look = asyncio.Event()
        self._is_cancelled = asyncio.Event()
        self._is_quick = batch.endpoint == "/v1/embeddings"
        """Whether its lines are quick jobs, which have no logs."""
        self._is_input_missing = False
        self._num_held_bytes = 0
        """The answers, which take room among the tenant's files."""
        self._no_room: InvalidRequest | None = None
        self._look_for_room_at = 0.0
        self._looking_for_room = asyncio.Lock()

    def look(self) -> None:
        """Renew the lease now, and see whether the batch was cancelled."""
        self._look.set()

    async def run(self) -> None:
        """Run the batch to its end, or until another gateway has claimed it."""
        try:
            await self._run()
        except asyncio.CancelledError:
            with suppress(LeaseLost, Unavailable):
                await self._batches.renew(self.batch.id, self.batch.fence, 0)
            raise
        finally:
            self._hold(-self._num_held_bytes)

    async def _run(self) -> None:
        fence = self.batch.fence
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(self._keep()), tasks.create_task(self._record())]
                await self._work()
                for helper in helpers:
                    helper.cancel()
        except* LeaseLost:  # or the batch has just ended here
            pass
        try:
            await self._refresh()
        except NotFound:
            logger.warning("batch erased", extra={"batch": self.batch.id})
            return
        fields = {"batch": self.batch.id, "status": self.batch.status}
        if self.batch.fence == fence:
            logger.info("batch ended", extra=fields)
        else:
            logger.warning("batch claimed by another gateway", extra=fields)
        with suppress(Unavailable):  # a sweep makes up for it
            await self._batches.forget_answers()

    async def _keep(self) -> None:
        """Keep the lease. Raises `LeaseLost`."""
        lease_s = self._gateway.tuning.batch_lease_s
        while True:
            # The next look may be late: a claim can wait for the database for a minute.
            with suppress(TimeoutError):
                async with asyncio.timeout(lease_s / 3):
                    await self._look.wait()
            self._look.clear()
            # Without a database nobody else can claim the batch either.
            with suppress(Unavailable):
                status = await self._batches.renew(self.batch.id, self.batch.fence, lease_s)
                if status == "cancelling":
                    self._is_cancelled.set()

    async def _record(self) -> None:
        """Write answers to the database, all that have arrived at once. Raises `LeaseLost`."""
        while True:
            taken = [await self._answers.get()]
            while not self._answers.empty() and len(taken) < _ANSWERS_AT_ONCE:
                taken.append(self._answers.get_nowait())
            answers = [answer for answer, _ in taken]
            await _retry(partial(self._batches.record, self.batch.id, self.batch.fence, answers))
            for _, written in taken:
                if not written.done():
                    written.set_result(None)
                self._answers.task_done()

    async def _work(self) -> None:
        batch_id, fence = self.batch.id, self.batch.fence
        if self.batch.status == "validating":
            await self._while_wanted(self._check())
        if self.batch.status == "failed":
            return
        if self.batch.status == "in_progress":
            self._hold(await _retry(partial(self._batches.answered_bytes, batch_id)))
            await self._while_wanted(self._answer_all())
            await self._answers.join()
        elif self.batch.status == "cancelling" and self.batch.fence > 1 and not self._is_quick:
            await self._stop_lines()
        await _retry(partial(self._batches.begin_to_end, batch_id, fence))
        await self._refresh()
        await _retry(self._end)

    async def _refresh(self) -> None:
        get = partial(self._batches.get, self.batch.tenant, self.batch.id)
        self.batch = await _retry(get)

    async def _while_wanted(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` until it is done, the batch is cancelled, or its window is over."""
        working = asyncio.create_task(work)
        cancelling = asyncio.create_task(self._is_cancelled.wait())
        left_s = max(0.0, self.batch.expires_at - time.time())
        try:
            await asyncio.wait(
                [working, cancelling], timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            self._lines.ends_jobs = not working.done()
        finally:
            cancelling.cancel()
            working.cancel()
            await asyncio.wait([working])
        if not working.cancelled():
            working.result()

    async def _check(self) -> None:
        try:
            checked = await _retry(self._checked)
        except FileNotFoundError:
            checked = Checked()
            message = f"The bytes of the file {self.batch.input_file_id} are missing."
            checked.add(BadInput("missing_file", message, "input_file_id"))
        batch_id, fence = self.batch.id, self.batch.fence
        if checked.errors:
            fields = {"batch": batch_id, "num_errors": checked.num_errors}
            logger.info("input of a batch is not valid", extra=fields)
            move = partial(self._batches.fail, batch_id, fence, checked.errors)
        else:
            move = partial(
                self._batches.start,
                batch_id,
                fence,
                num_lines=checked.num_lines,
                models=checked.models,
            )
        await _retry(move)
        await self._refresh()

    async def _checked(self) -> Checked:
        async with aclosing(self._input(self._gateway.settings.max_body_bytes)) as lines:
            key = key_of(self.batch, self._gateway.keys)
            endpoint = self.batch.endpoint
            return await check(self._gateway, endpoint, key, lines, self._large_check)

    async def _answer_all(self) -> None:
        """Answer the lines that have no answer, for each model separately: a model without workers
        does not hold up the other models."""
        models = self.batch.models or ()
        memory = BatchMemory(self._memory, _NUM_WINDOWS * len(models))
        with closing(self._new_order()) as order:
            await self._arrange(order)
            async with asyncio.TaskGroup() as tasks:
                for model in models:
                    tasks.create_task(self._answer_model(model, order.of_model(model), memory))

    def _max_lines(self, model: str) -> int:
        """The number of lines of a model that may be in the queue now."""
        if self._is_quick:
            return _MAX_EMBEDDINGS
        tuning, workers = self._gateway.tuning, self._gateway.workers.of_model(model)
        num_slots = sum(worker.max_num_seqs for worker in workers)
        return min(max(tuning.batch_window, 2 * num_slots), tuning.max_batch_window)

    async def _answer_model(
        self, model: str, places: Iterator[LinePlace], memory: BatchMemory
    ) -> None:
        computed, repeated = (Window(partial(self._max_lines, model), memory) for _ in range(2))
        twins, may_wait = Twins(), asyncio.Semaphore(_MAX_WAITING_TWINS)
        async with asyncio.TaskGroup() as tasks:
            for place in places:
                role = twins.role(place.twin_key)
                if role is not None and not role.is_first:
                    await may_wait.acquire()
                    task = tasks.create_task(self._repeat_at(place, role, computed, repeated))
                    task.add_done_callback(lambda _: may_wait.release())
                    continue
                leave = await computed.enter(place.num_bytes)
                if self._is_input_missing:
                    leave(None)
                    return
                # A callback is called even if the task is cancelled before it has begun.
                tasks.create_task(self._answer_at(place, role)).add_done_callback(leave)

    async def _repeat_at(
        self, place: LinePlace, role: TwinRole, computed: Window, repeated: Window
    ) -> None:
        """Answer a line once the answer to an equal line is known. Until then the line keeps no
        worker busy, and its text is not read, so it takes no place from other lines."""
        window = repeated if await role.group.wait() else computed
        leave = await window.enter(place.num_bytes)
        try:
            if not self._is_input_missing:
                await self._answer_at(place, role)
        finally:
            leave(None)

    async def _stop_lines(self) -> None:
        """End the jobs that the last gateway had published. Only the first lines without an answer
        can have a job, for each model as many lines as fit into the two largest windows."""
        num_begun = 2 * self._gateway.tuning.max_batch_window
        with closing(self._new_order()) as order:
            await self._arrange(order)
            async with asyncio.TaskGroup() as tasks:
                for model in self.batch.models or ():
                    for place in islice(order.of_model(model), num_begun):
                        request_id = self._lines.request_id(place.number)
                        tasks.create_task(self._lines.stop(request_id))

    def _new_order(self) -> LineOrder:
        return LineOrder(is_ranked=self._gateway.tuning.has_batch_order)

    async def _arrange(self, order: LineOrder) -> None:
        """Add the lines that have no answer. A line of no model of the batch is added to the first
        model's: every line is answered, if only with an error."""
        models = self.batch.models or ()
        async with aclosing(self._unanswered()) as lines:
            async for line in lines:
                self._lines.closing.num_left += 1
                model = line.model
                of = model if isinstance(model, str) and model in models else models[0]
                await order.add(line, of)

    async def _answer_at(self, place: LinePlace, role: TwinRole | None) -> None:
        try:
            text = await self._read(place)
            if text is not None:
                await self._answer(InputLine(place.number, text, place.start), role)
        finally:
            if role is not None and role.is_first:
                role.group.give(None)

    async def _read(self, place: LinePlace) -> bytes | None:
        """The text of a line; None if the file is missing."""
        while not self._is_input_missing:
            parts = self._files.content(self.batch.input_file_id, place.start, place.end)
            try:
                return b"".join([part async for part in parts])
            except Unavailable:
                await asyncio.sleep(_RETRY_PAUSE_S)
            except FileNotFoundError:
                self._miss_input()
        return None

    def _miss_input(self) -> None:
        """Note that the storage has lost the file: no further line can be answered."""
        if not self._is_input_missing:
            self._is_input_missing = True
            fields = {"batch": self.batch.id, "file": self.batch.input_file_id}
            logger.error("input of a batch is missing", extra=fields)

    async def _answer(self, line: InputLine, role: TwinRole | None) -> None:
        async def record(outcome: LineOutcome) -> None:
            text = outcome.line(line_id(self.batch.id, line.number), line.custom_id)
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            is_error, is_promoted = outcome.is_error, outcome.is_promoted
            answer = LineAnswer(line.number, is_error, text, outcome.used, is_promoted)
            self._answers.put_nowait((answer, written))
            self._hold(len(text))
            await written
            self._lines.closing.answered()

        no_room = await self._lack_of_room()
        if no_room is None:
            await self._lines.answer(line, record, role)
        else:
            await record(LineOutcome(self._lines.request_id(line.number), no_room))

    def _hold(self, num_bytes: int) -> None:
        self._num_held_bytes += num_bytes
        self._files.hold_answers(self.batch.tenant, num_bytes)

    async def _lack_of_room(self) -> InvalidRequest | None:
        """Why a line is not answered, if the files and answers of the tenant have no room for its
        answer."""
        async with self._looking_for_room:
            now = time.monotonic()
            if now >= self._look_for_room_at:
                self._look_for_room_at = now + self._gateway.tuning.batch_room_s
                try:
                    await _retry(partial(self._files.bytes_left, self.batch.tenant))
                    self._no_room = None
                except InvalidRequest as error:
                    self._no_room = error
            return self._no_room

    def _input(self, max_bytes: int) -> AsyncGenerator[InputLine, None]:
        return input_lines(self._files.content(self.batch.input_file_id), max_bytes)

    async def _unanswered(self) -> AsyncGenerator[InputLine, None]:
        """The lines of a checked file that have no answer, in the order of the file; none of a file
        that is missing."""
        last, known_until = 0, 0
        answered: set[int] = set()
        while True:
            try:
                # The gateway that checked the file may have had another limit.
                async with aclosing(self._input(sys.maxsize)) as lines:
                    async for line in lines:
                        if line.number <= last or line.number in answered:
                            continue
                        if line.number > known_until:
                            known_until = line.number + _LINES_AT_ONCE
                            answered = await self._batches.answered(
                                self.batch.id, line.number, known_until
                            )
                        last = line.number
                        if line.number not in answered:
                            yield line
            except Unavailable:
                await asyncio.sleep(_RETRY_PAUSE_S)
            except FileNotFoundError:
                self._miss_input()
                return
            else:
                return

    async def _end(self) -> None:
        """Write the files, and end the batch."""
        batch = self.batch
        num_answered = batch.num_completed + batch.num_failed
        ending: BatchEnding = "expired"
        if batch.status == "cancelling":
            ending = "cancelled"
        elif batch.models is not None and num_answered == batch.num_lines:
            ending = "completed"
        output_file_id = error_file_id = None
        if batch.num_completed:
            output_file_id = await self._write("output", is_error=False)
        if batch.num_failed or num_answered < batch.num_lines:
            error_file_id = await self._write("error", is_error=True, ending=ending)
        await self._batches.end(
            batch.id,
            batch.fence,
            ending,
            output_file_id=output_file_id,
            error_file_id=error_file_id,
        )

    async def _write(self, name: str, *, is_error: bool, ending: BatchEnding = "completed") -> str:
        """Write a file that exists once the batch has ended; returns its id."""
        batch = self.batch
        kept_s = batch.output_expires_after_s or self._gateway.settings.retention_days.files * DAY_S
        writing = self._files.writing(
            batch.tenant, f"{batch.id}_{name}.jsonl", OUTPUT_PURPOSE, is_hidden=True
        )
        async with writing as draft:
            draft.expires_at = int(time.time() + kept_s)
            last = 0
            while page := await self._batches.answers(
                batch.id,
                is_error=is_error,
                after=last,
                limit=_ANSWERS_AT_ONCE,
                max_bytes=_ANSWER_BYTES_AT_ONCE,
            ):
                await draft.write(b"".join([answer.text + b"\n" for answer in page]))
                last = page[-1].line
            if ending != "completed":
                async with aclosing(self._unanswered()) as lines:
                    async for line in lines:
                        text = unexecuted_line(batch.id, line.number, line.custom_id, ending)
                        await draft.write(text + b"\n")
        return draft.id


async def _next_look(changed: asyncio.Event, look_interval_s: float = _LOOK_INTERVAL_S) -> None:
    """Wait for the next look, which is sooner if a batch was created or cancelled."""
    await asyncio.sleep(_MIN_LOOK_INTERVAL_S)
    with suppress(TimeoutError):
        async with asyncio.timeout(look_interval_s - _MIN_LOOK_INTERVAL_S):
            await changed.wait()
    changed.clear()


async def _sweep(state: StoredState, *, kept_s: float) -> None:
    """``kept_s``: seconds for which batches are kept after their end."""
    await state.uploads.sweep()
    await state.files.sweep()
    await state.batches.sweep(time.time() - kept_s)


async def _retry(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Call until database and storage are reachable."""
    while True:
        try:
            return await call()
        except Unavailable:
            await asyncio.sleep(_RETRY_PAUSE_S)

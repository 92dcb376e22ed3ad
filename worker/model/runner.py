"""Runs the steps of a decoder in order, on a thread of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from kernels.providers import Ops
from worker.engine.cache.layout import CacheGroup
from worker.engine.interface import ScheduledBatch, StepFailed, StepScores
from worker.model.forward import Decoder
from worker.model.graphs import DecodeGraphs
from worker.model.inputs import HostStep, StepInputs, lay_out
from worker.model.kv_cache import KVCache
from worker.model.sampling.row_scores import RowScores, ScorePlan, score
from worker.model.sampling.sampler import sample
from worker.model.sampling.stated_tokens import JudgedRows, judge

_Work = TypeVar("_Work")
_Prepared: TypeAlias = tuple[StepInputs, Callable[[], Tensor]]
"""A step's inputs on the device, and the function that computes its logits."""


@dataclass(frozen=True, slots=True)
class _Result:
    """The results of a step; on the host once ``copied`` has completed."""

    token_ids: Tensor
    scores: RowScores | None
    copied: torch.Event | None
    predicted: Sequence[int] = ()
    """Already on the host."""
    judged: JudgedRows | None = None


class TorchStep:
    """A `StepHandle`; the token ids are on the host once the device has completed the step."""

    def __init__(self, step: "Future[_Result]", score_plan: ScorePlan) -> None:
        self._step = step
        self._score_plan = score_plan

    def result(self) -> list[int]:
        drawn: list[int] = self._wait().token_ids.tolist()
        return drawn

    def scores(self) -> StepScores:
        result = self._wait()
        scores = StepScores({}, ())
        if result.scores is not None:
            scores = self._score_plan.step_scores(result.scores)
        judged = () if result.judged is None else result.judged.on_host()
        return scores._replace(predicted=result.predicted, judged=judged)

    def _wait(self) -> _Result:
        result = self._step.result()
        if result.copied is not None:
            result.copied.synchronize()
        return result


class TorchRunner:
    """A `ModelRunner` for any `Decoder`.

    The caller's thread lays out inputs while the compute thread runs the previous step; torch
    releases the GIL in its operations. Only the compute thread touches weights, cache and the last
    step's tokens. On CUDA it only enqueues work on the device. If the next step is already waiting,
    a result is announced after that step has been enqueued, because the thread that it wakes
    competes for the GIL.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        ops: Ops,
        *,
        max_seq_len: int,
        max_num_batched_tokens: int,
        num_longest: int | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """``num_longest`` is the number of sequences of maximum length that fit into the cache, for
        operators. ``graphs`` run the steps that they were recorded for."""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._ops = ops
        self._max_seq_len = max_seq_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_longest = num_longest
        self._predicts = decoder.traits.prediction_cost is not None
        self._graphs = graphs
        self._drawn = torch.empty(max_num_batched_tokens, dtype=torch.int64, device=decoder.device)
        self._num_drawn = 0
        self._num_launched = 0
        self._num_run = 0
        self._held_back: tuple[Future[_Result], _Result] | None = None
        self._compute = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="compute",
            initializer=use_device,
            initargs=(decoder.device,),
        )

    @property
    def decoder(self) -> Decoder:
        return self._decoder

    @property
    def num_blocks(self) -> int:
        return self._kv_cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._kv_cache.block_size

    @property
    def groups(self) -> Sequence[CacheGroup]:
        return self._kv_cache.layout.groups

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self._max_seq_len

    def facts(self) -> dict[str, str | int]:
        """How the model runs, for operators."""
        cache, state = self._kv_cache, self._kv_cache.layout.state
        num_growing = len(self.groups) - (state is not None)
        facts: dict[str, str | int] = {
            "device": str(self._decoder.device),
            "dtype": str(self._decoder.dtype).removeprefix("torch."),
            "kv_dtype": str(self._decoder.cache_dtype).removeprefix("torch."),
            "kv_cache_bytes": cache.num_bytes,
        }
        if state is not None:
            # The state that a step reads, and the state that it writes.
            facts["sequence_state_bytes"] = (
                2 * state.num_blocks * (cache.num_bytes // cache.num_blocks)
            )
        if num_growing:
            facts["kv_cache_tokens"] = self.num_blocks // num_growing * self.block_size
        if self._num_longest is not None:
            facts["kv_cache_sequences"] = self._num_longest
        return facts

    def launch(self, batch: ScheduledBatch) -> TorchStep:
        """Start a step. Raises `ValueError` if the batch exceeds the limits."""
        if batch.num_tokens > self._max_num_batched_tokens:
            raise ValueError(f"{batch.num_tokens} tokens, at most {self._max_num_batched_tokens}")
        step = lay_out(
            batch,
            self.block_size,
            self._decoder.device,
            self._graph_size,
            self._kv_cache.layout,
        )
        future: Future[_Result] = Future()
        # On the CPU, inputs are where the decoder reads them, and the compute thread, on which the
        # next step waits, has less to do.
        ready = self._prepared(step) if self._decoder.device.type == "cpu" else None
        self._compute.submit(self._run, step, ready, future)
        self._num_launched += 1
        return TorchStep(future, step.score_plan)

    def submit(self, work: Callable[[], _Work]) -> "Future[_Work]":
        """Run ``work`` on the compute thread, between steps."""

        def between_steps() -> _Work:
            self._release()
            return work()

        return self._compute.submit(between_steps)

    def close(self) -> None:
        """Wait for launched steps; a later launch raises `RuntimeError`."""
        self._compute.shutdown()

    def _graph_size(self, num_seqs: int) -> int | None:
        return None if self._graphs is None else self._graphs.size_for(num_seqs)

    def _prepared(self, step: HostStep) -> _Prepared:
        inputs = step.send()
        graphs = self._graphs
        if step.graph_size is None or graphs is None:
            return inputs, self._decoder.prepare(inputs.forward, self._kv_cache)
        return inputs, lambda: graphs.logits(inputs.forward)[: step.num_sampled]

    def _run(self, step: HostStep, ready: _Prepared | None, future: "Future[_Result]") -> None:
        try:
            result = self._compute_or_fail(step, ready)
        except BaseException as error:  # noqa: BLE001 (the caller decides how to react)
            self._release()
            future.set_exception(error)
        else:
            self._held_back = future, result
        self._num_run += 1
        if self._num_run >= self._num_launched:
            self._release()

    def _release(self) -> None:
        """Set the result that is held back, if any."""
        if self._held_back is not None:
            future, result = self._held_back
            self._held_back = None
            future.set_result(result)

    def _compute_or_fail(self, step: HostStep, ready: _Prepared | None) -> _Result:
        with suppress(torch.OutOfMemoryError):
            return self._step(step, ready)
        # The step's tensors can be freed only now, because the error held them until it was
        # handled.
        torch.cuda.empty_cache()
        raise StepFailed("the device has no memory for this step")

    @torch.inference_mode()
    def _step(self, step: HostStep, ready: _Prepared | None) -> _Result:
        if step.num_previous > self._num_drawn:
            raise StepFailed("the step before this one failed")
        # If this step fails, the next step has no previous tokens and fails too.
        self._num_drawn = 0
        inputs, forward = ready or self._prepared(step)
        carried = self._drawn.index_select(0, inputs.carried_rows)
        inputs.forward.token_ids.index_copy_(0, inputs.carried_tokens, carried)
        self._release()
        logits = forward()
        scored = None
        if inputs.scores is not None:
            is_every = len(inputs.scores.score_rows) == len(logits)
            # A copy, because edits are applied in place; of megabytes, so only if necessary.
            is_shared = is_every and inputs.edits is None
            scored = logits if is_shared else logits[inputs.scores.score_rows]
        judged = None
        if inputs.stated is not None:
            judged = judge(
                self._ops, logits[: step.num_sampled], inputs.sampling, inputs.edits, inputs.stated
            )
        drawn = sample(self._ops, logits[: step.num_sampled], inputs.sampling, inputs.edits)
        # `NO_TOKEN` is no index: the next step reads an embedding for it, and its score is NaN.
        indices = torch.clamp(drawn, min=0, out=self._drawn[: step.num_sampled])
        self._num_drawn = step.num_sampled
        # Alone, decodes for which nothing is predicted would pay for what few of them may use.
        is_kept = self._predicts and (bool(step.predicted_rows) or step.max_query_len > 1)
        predicted = self._predict(step, inputs, indices) if is_kept else []
        if scored is None or inputs.scores is None:
            return _to_host(drawn, predicted=predicted, judged=judged)
        depth = step.score_plan.depth
        scores = score(self._ops, scored, inputs.scores, indices, depth)
        return _to_host(drawn, scores, predicted, judged)

    def _predict(self, step: HostStep, inputs: StepInputs, drawn: Tensor) -> list[int]:
        """Let the decoder keep what predictions need of the step, and predict the token after the
        last drawn token that counts of the sequences that want it. The decoder runs on the CPU."""
        token_ids = inputs.forward.token_ids
        drawing = inputs.forward.sampled_rows[: step.num_sampled]
        next_ids = token_ids.roll(-1)
        next_ids[inputs.continued_tokens] = inputs.continued_ids
        next_ids[drawing] = drawn
        last = [
            next((row for row in rows[:-1] if token_ids[drawing[row] + 1] != drawn[row]), rows[-1])
            for rows in step.predicted_rows
        ]
        behind = replace(inputs.forward, token_ids=next_ids, sampled_rows=drawing[last])
        logits = self._decoder.predict(behind, self._kv_cache)
        predicted: list[int] = self._ops.most_likely(logits).tolist() if last else []
        return predicted


def use_device(device: torch.device) -> None:
    """Make ``device`` the current device of the calling thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # it rejects a device without an index


def _to_host(
    drawn: Tensor,
    scores: RowScores | None = None,
    predicted: Sequence[int] = (),
    judged: JudgedRows | None = None,
) -> _Result:
    """Copy to the host asynchronously."""
    if drawn.device.type == "cpu":
        return _Result(drawn, scores, None, predicted, judged)
    there = _pinned(drawn)
    scores = None if scores is None else RowScores(*map(_pinned, scores))
    judged = None if judged is None else JudgedRows(*map(_pinned, judged))
    copied = torch.Event("cuda")
    copied.record()
    return _Result(there, scores, copied, predicted, judged)


def _pinned(tensor: Tensor) -> Tensor:
    there = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return there.copy_(tensor, non_blocking=True)

"""Many workers as arrays. All advance together, by a fraction of a second at a time.

A sequence gets one token in each step of its worker. So a worker is described by the number of
steps that it has made, and a sequence by the step that is its last one. A step takes as long as the
cost model says, and prompts lengthen it up to ``max_step_s``.
"""

from dataclasses import dataclass

import numpy as np

from bench.simulation.spec import Spec
from bench.simulation.traffic import Arrivals, Floats, Ints, prompt_seconds
from worker.engine.scheduler import MIN_PROMPT_TOKENS

_AIM = 0.9
"""The part of ``max_step_s`` that the scheduler plans for."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Sequences that have got their last token, in its order."""

    at: Floats
    worker: Ints
    tenant: Ints
    arrived_at: Floats


class Servers:
    """The workers with the indices below ``capacity``. Those without sequences cost nothing but
    their place in the arrays."""

    def __init__(self, spec: Spec, capacity: int, num_tenants: int) -> None:
        shape = (capacity, spec.max_num_seqs)
        self.num_running = np.zeros(capacity, dtype=np.int64)
        self.running_of = np.zeros(num_tenants, dtype=np.int64)
        """Running sequences of each tenant."""
        self.busy_s = 0.0
        """Worker-seconds of steps."""
        self._spec = spec
        self._steps = np.zeros(capacity)
        self._last_step = np.full(shape, np.inf)
        """Of the sequence in each slot; infinite for a free one."""
        self._first_at = np.zeros(shape)
        """When the sequence in each slot gets its first token."""
        self._width = 1
        """No sequence is in a slot from this one on: free slots are taken from the front."""
        self._arrived_at = np.zeros(shape)
        self._tenant = np.zeros(shape, dtype=np.int64)
        self._prompt = np.zeros(shape, dtype=np.int64)
        self._answer = np.zeros(shape, dtype=np.int64)
        self._ahead = np.zeros(capacity)
        """The tokens of all running sequences are this and ``num_running`` times ``_steps``."""
        self._prefill_s = np.zeros(capacity)
        """Seconds of prompts that are not computed yet."""
        self._unpaid_s = np.zeros(capacity)
        """Seconds of prompts that were computed in the last interval in the time of decodes."""
        self._now = self._dt = 0.0
        # Of the last interval, by worker.
        self._prefill_before_s = np.zeros(0)
        self._decode_s = self._chunk_s = np.zeros(0)

    def advance(self, now: float, dt: float, top: int) -> Ended:
        """Let the workers with indices below ``top`` work from ``now`` on for ``dt`` seconds."""
        self._now, self._dt = now, dt
        spec, prices = self._spec, self._spec.prices
        running, steps = self.num_running[:top], self._steps[:top]
        decoding = running - np.count_nonzero(self._first_at[:top, : self._width] > now, axis=1)
        mean_len = (self._ahead[:top] + running * steps) / np.maximum(running, 1)
        each_s = prices.decode + prices.decode_pair * np.maximum(mean_len, 0.0)
        decode_s = prices.step + decoding * each_s
        most_s = prices.prompt_token * np.maximum(spec.max_num_batched_tokens - decoding, 1)
        least_s = prices.prompt_token * np.maximum(MIN_PROMPT_TOKENS, decoding)
        in_time_s = np.minimum(np.maximum(_AIM * spec.max_step_s - decode_s, least_s), most_s)
        chunk_s = np.where(decoding > 0, in_time_s, most_s)
        before_s = self._prefill_s[:top].copy()
        prefilled_s = np.minimum(before_s, dt * chunk_s / (decode_s + chunk_s))
        self._prefill_s[:top] -= prefilled_s
        paid_s = prefilled_s + self._unpaid_s[:top]
        self._unpaid_s[:top] = np.maximum(paid_s - dt, 0.0)
        made = np.where(running > 0, np.maximum(dt - paid_s, 0.0) / decode_s, 0.0)
        steps += made
        self.busy_s += float((np.minimum(paid_s, dt) + made * decode_s).sum())
        self._prefill_before_s, self._decode_s, self._chunk_s = before_s, decode_s, chunk_s
        return self._end(top, made)

    def _end(self, top: int, made: Floats) -> Ended:
        """Free the slots of sequences that have got their last token."""
        overdue = self._steps[:top, None] - self._last_step[:top, : self._width]
        worker, slot = np.nonzero(overdue >= 0)
        late_s = overdue[worker, slot] * self._dt / np.maximum(made[worker], 1e-9)
        at = self._now + self._dt - np.minimum(late_s, self._dt)
        order = np.argsort(at, kind="stable")
        worker, slot = worker[order], slot[order]
        ended = Ended(at[order], worker, self._tenant[worker, slot], self._arrived_at[worker, slot])
        self._free(worker, slot)
        # The steps after the last sequence of a worker did not take place.
        is_empty = self.num_running[worker] == 0
        emptied, last = np.unique(worker[is_empty][::-1], return_index=True)
        idle_s = self._now + self._dt - ended.at[is_empty][::-1][last]
        self.busy_s -= float(np.minimum(idle_s, made[emptied] * self._decode_s[emptied]).sum())
        return ended

    def _free(self, worker: Ints, slot: Ints) -> None:
        tokens = self._prompt[worker, slot] + self._answer[worker, slot]
        np.subtract.at(self._ahead, worker, tokens - self._last_step[worker, slot])
        np.subtract.at(self.num_running, worker, 1)
        np.subtract.at(self.running_of, self._tenant[worker, slot], 1)
        self._last_step[worker, slot] = np.inf
        self._first_at[worker, slot] = 0.0
        idle = worker[self.num_running[worker] == 0]
        self._ahead[idle] = 0.0

    def begin(self, jobs: Arrivals, worker: Ints, start: Floats) -> Floats:
        """Begin a job at each of these workers, which have free slots, at times within the last
        interval. Returns the times of the first tokens."""
        order = np.argsort(worker, kind="stable")
        sorted_worker = worker[order]
        is_first = np.ones(len(order), dtype=bool)
        is_first[1:] = sorted_worker[1:] != sorted_worker[:-1]
        heads = np.flatnonzero(is_first)
        group = np.cumsum(is_first) - 1
        cost_s = prompt_seconds(self._spec, jobs.prompt)
        before_s = np.cumsum(cost_s[order]) - cost_s[order]
        same_s, nth = np.empty_like(cost_s), np.empty_like(worker)
        same_s[order] = before_s - before_s[heads][group]
        nth[order] = np.arange(len(order)) - heads[group]
        first, last_step = self._foretold(jobs, worker, start, cost_s, same_s)
        for k in range(int(nth.max(initial=-1)) + 1):
            which = np.flatnonzero(nth == k)
            at = worker[which]
            slot = np.isinf(self._last_step[at, : self._width + 1]).argmax(axis=1)
            self._width = max(self._width, int(slot.max()) + 1)
            self._last_step[at, slot] = last_step[which]
            self._first_at[at, slot] = first[which]
            self._arrived_at[at, slot] = jobs.at[which]
            self._tenant[at, slot] = jobs.tenant[which]
            self._prompt[at, slot] = jobs.prompt[which]
            self._answer[at, slot] = jobs.answer[which]
        np.add.at(self._ahead, worker, jobs.prompt + jobs.answer - last_step)
        np.add.at(self.num_running, worker, 1)
        np.add.at(self.running_of, jobs.tenant, 1)
        return first

    def _foretold(
        self, jobs: Arrivals, worker: Ints, start: Floats, cost_s: Floats, same_s: Floats
    ) -> tuple[Floats, Floats]:
        """When jobs get their first tokens, and the steps that are their last ones. ``cost_s`` is
        that of their own prompts, ``same_s`` that of others which began at the same worker within
        the interval."""
        prices, end = self._spec.prices, self._now + self._dt
        decode_s, chunk_s = self._decode_s[worker], self._chunk_s[worker]
        share = chunk_s / (decode_s + chunk_s)
        done_s = share * (start - self._now)
        ahead_s = np.maximum(self._prefill_before_s[worker] - done_s, 0.0) + same_s
        is_idle = (self.num_running[worker] == 0) & (ahead_s == 0)
        cycle_s = decode_s + np.minimum(ahead_s, chunk_s)
        # The rest of the step that runs, and the next one, which is planned already.
        wait_s = np.where(is_idle, 0.0, 2 * cycle_s - start % cycle_s)
        # Half of a step is for the shorter prompts: none waits for the whole of a longer one.
        ahead_s = np.minimum(np.maximum(ahead_s - share * wait_s, 0.0), cost_s)
        left_s = ahead_s + cost_s
        each_s = np.where(is_idle, prices.step, decode_s)
        first: Floats = start + wait_s + np.ceil(left_s / chunk_s) * each_s + left_s
        own_s = np.maximum(end - start - wait_s, 0.0) * np.where(is_idle, 1.0, share)
        computed_s = np.minimum(own_s, cost_s)
        np.add.at(self._prefill_s, worker, cost_s - computed_s)
        np.add.at(self._unpaid_s, worker, computed_s)
        self.busy_s += float(np.maximum(end - first, 0.0)[is_idle].sum())
        # The worker will make fewer steps because of this prompt; its own sequence will not.
        own_step_s = decode_s + prices.decode + prices.decode_pair * jobs.prompt
        num_later = (first - end - cost_s) / own_step_s
        return first, self._steps[worker] + jobs.answer - 1 + num_later

    def drop_older(self, at: float) -> Ints:
        """Remove the sequences of requests that arrived before ``at``; returns their tenants."""
        is_used = np.isfinite(self._last_step)
        worker, slot = np.nonzero(is_used & (self._arrived_at < at))
        tenant = self._tenant[worker, slot]
        self._free(worker, slot)
        self._width = int(np.flatnonzero(is_used.any(axis=0)).max(initial=0)) + 1
        return tenant

    def evict(self, worker: int) -> Arrivals:
        """Remove all sequences of a worker. Their prompts contain what was generated."""
        slot = np.flatnonzero(np.isfinite(self._last_step[worker]))
        left = self._last_step[worker, slot] - self._steps[worker]
        answer = self._answer[worker, slot]
        done = np.clip(answer - np.ceil(left), 0, answer - 1).astype(np.int64)
        jobs = Arrivals(
            self._arrived_at[worker, slot],
            self._tenant[worker, slot],
            self._prompt[worker, slot] + done,
            answer - done,
        )
        self._free(np.full(len(slot), worker), slot)
        self._prefill_s[worker] = self._unpaid_s[worker] = 0.0
        return jobs

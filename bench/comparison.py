"""Measures systems in turn under the same load, in several runs."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import uvloop

from bench.figures import Figures, Measurement, figures_of
from bench.load import random_requests, run_load
from bench.other_load import undisturbed
from bench.servers import Server, running
from bench.systems import Room, System
from cli.terminal import notices

_WARM_UP_TOKENS = 16
_WARM_UP_SEED = 1 << 20
_ATTEMPT_SEEDS = 1 << 21
_LENGTH_SEEDS = 1 << 24

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Setting:
    """The load of a measurement, which is the same for all systems."""

    num_users: int
    num_requests: int
    prompt_len: int
    max_tokens: int
    seed: int


Client = Callable[[str, Setting], Figures]
"""Measures the server at a URL under a load."""


@dataclass(frozen=True)
class ComparisonPlan:
    """The settings of a run."""

    users: Sequence[int]
    requests_per_user: int
    min_requests: int
    prompt_lens: Sequence[int] = (128,)
    max_tokens: int = 128

    @property
    def room(self) -> Room:
        # llama-server keeps one slot free.
        return Room(max(self.users), max(self.prompt_lens) + self.max_tokens + 1)

    def settings(self, run: int) -> Iterator[Setting]:
        """The settings of a run. Each has its own prompts, so that no cache helps a later run."""
        for index, prompt_len in enumerate(self.prompt_lens):
            for num_users in self.users:
                yield Setting(
                    num_users=num_users,
                    num_requests=max(self.min_requests, self.requests_per_user * num_users),
                    prompt_len=prompt_len,
                    max_tokens=self.max_tokens,
                    seed=1000 * run + num_users + _LENGTH_SEEDS * index,
                )


def own_client(url: str, setting: Setting) -> Figures:
    """A client that uses `bench.load`. Raises `bench.load.LoadError` inside an `ExceptionGroup`."""
    requests = random_requests(
        setting.num_requests,
        seed=setting.seed,
        prompt_len=setting.prompt_len,
        max_tokens=setting.max_tokens,
    )
    return figures_of(run_loop(run_load(url, requests, setting.num_users)))


def compare(
    systems: Sequence[System],
    plan: ComparisonPlan,
    runs: Iterable[int],
    client: Client,
) -> Iterator[Measurement]:
    """Measure every system in each of ``runs``, so that a drift of the machine affects all of
    them."""
    for run in runs:
        for system in systems:
            notices.print(f"run {run}: {system.name}, {system.weights}")
            with running(system) as server:
                yield from _measure(server, system, plan, run, client)


def run_loop(main: Coroutine[Any, Any, _Result]) -> _Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def _measure(
    server: Server, system: System, plan: ComparisonPlan, run: int, client: Client
) -> Iterator[Measurement]:
    for setting in plan.settings(run):
        _warm_up(server, setting)
        (figures, cpu_ms), other_cores = undisturbed(partial(_once, server, setting, client))
        notices.print(
            f"  {setting.num_users} users, prompts of {setting.prompt_len}: "
            f"{figures.tokens_per_s:.1f} tok/s"
        )
        yield Measurement(
            system=system.name,
            weights=system.weights,
            is_peer=system.is_peer,
            num_users=setting.num_users,
            run=run,
            start_s=server.start_s,
            memory_bytes=server.peak_memory_bytes(),
            other_cores=other_cores,
            figures=figures,
            cpu_ms_per_token=cpu_ms,
            prompt_len=setting.prompt_len,
        )


def _once(
    server: Server, setting: Setting, client: Client, attempt: int
) -> tuple[Figures, dict[str, float]]:
    """The figures, and the milliseconds of CPU time that each role spends on a token."""
    before = server.cpu_s()
    figures = client(server.url, replace(setting, seed=setting.seed + _ATTEMPT_SEEDS * attempt))
    num_tokens = setting.num_requests * setting.max_tokens
    after = server.cpu_s()
    return figures, {role: 1e3 * (after[role] - before[role]) / num_tokens for role in before}


def _warm_up(server: Server, setting: Setting) -> None:
    requests = random_requests(
        setting.num_users,
        seed=_WARM_UP_SEED + setting.seed,
        prompt_len=setting.prompt_len,
        max_tokens=_WARM_UP_TOKENS,
    )
    run_loop(run_load(server.url, requests, setting.num_users))

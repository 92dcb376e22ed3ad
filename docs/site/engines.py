"""The tables of ``docs/engines.md``."""

from collections.abc import Iterable, Sequence

from shared.messages import SamplingParams
from worker.engines.adapter import BY_THE_WORKER, EngineTraits
from worker.engines.adapters import ADAPTERS


def engine_table() -> str:
    """The engines, how they exchange tokens, and what their users must know."""
    return _table(
        [
            "`--engine`",
            "Versions",
            "Takes and returns",
            "Usual port",
            "Context length",
            "Sequences at once",
            "Equal seeds give equal tokens",
            "Remarks",
        ],
        (
            [
                f"`{name}`",
                _versions(adapter.traits),
                "token ids" if adapter.traits.has_token_ids else "text",
                str(adapter.default_port),
                "stated" if adapter.traits.states_max_seq_len else "set `--max-seq-len`",
                "stated" if adapter.traits.states_num_slots else "`--max-num-seqs`",
                "yes" if adapter.traits.repeats_seeds else "no",
                adapter.traits.remarks,
            ]
            for name, adapter in ADAPTERS.items()
        ),
    )


def capabilities() -> str:
    """Who applies each sampling parameter: the engine, the worker, or nobody."""
    return _table(
        ["Parameter", *(f"`{name}`" for name in ADAPTERS)],
        (
            [f"`{parameter}`", *(_who(parameter, name) for name in ADAPTERS)]
            for parameter in SamplingParams.__struct_fields__
            if parameter not in BY_THE_WORKER
        ),
    )


def _versions(traits: EngineTraits) -> str:
    return ", ".join(traits.versions) + ("" if traits.was_run else ", read and not run")


def _who(parameter: str, engine: str) -> str:
    traits = ADAPTERS[engine].traits
    if not traits.can(parameter):
        return "refused"
    if parameter == "constraint" and traits.constraints:
        return f"worker, and {', '.join(sorted(traits.constraints))} in the engine"
    return "engine" if parameter in traits.parameters else "worker"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

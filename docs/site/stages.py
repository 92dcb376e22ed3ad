"""The table of the stages of a reading of a log."""

from gateway.log.stages import TRANSITIONS, Stage


def stage_table() -> str:
    """Each stage, and the stages that follow it, with what leads there."""
    rows = [f"| {stage.label} | {stage.value} | {_following(stage)} |" for stage in Stage]
    return "\n".join(["| Stage | State of the log | What follows |", "|---|---|---|", *rows])


def _following(stage: Stage) -> str:
    after = {
        transition: stages[stage] for transition, stages in TRANSITIONS.items() if stage in stages
    }
    texts = [
        f"{following.label}: {transition.value}"
        for transition, following in after.items()
        if following is not stage
    ]
    return "<br>".join(texts) or "-"

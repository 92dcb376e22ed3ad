"""The findings of ``warren doctor``: one line for each check."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    detail: str
    remedy: str = ""
    """What to do about a warning or a failure."""


def ok(check: str, detail: str) -> Finding:
    return Finding(check, "ok", detail)


def warning(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check, "warning", detail, remedy)


def failure(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check, "failure", detail, remedy)


def skipped(check: str, detail: str) -> Finding:
    return Finding(check, "skipped", detail)

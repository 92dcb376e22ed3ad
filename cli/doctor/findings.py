"""The findings of ``warren doctor``: one line for each check."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

FindingStatus: TypeAlias = Literal["ok", "warning", "failure", "skipped"]
Subject: TypeAlias = Literal["machine", "broker", "gateway"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: FindingStatus
    detail: str
    remedy: str = ""
    """What to do about a warning or a failure."""
    subject: Subject = "machine"
    """What was checked: the machine of the command, with its settings, or what it reaches."""


def ok(check: str, detail: str) -> Finding:
    return Finding(check, "ok", detail)


def warning(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check, "warning", detail, remedy)


def failure(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check, "failure", detail, remedy)


def skipped(check: str, detail: str) -> Finding:
    return Finding(check, "skipped", detail)


def about(subject: Subject, findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings, about ``subject``."""
    return (replace(finding, subject=subject) for finding in findings)

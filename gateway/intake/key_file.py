"""The file of API keys: its format, and its changes.

The file has one line for each key; # starts a comment::

    ID TENANT SHA256 CREATED [NAME=VALUE ...]

    3c5c4c7894 alice 9f86d081... 2026-11-21 label="Web app" scopes=generate requests_per_minute=60

The names are the fields of `ApiKey` after ``created``. A key has 256 random bits, so a fast hash
like SHA-256 is sufficient. It is shown once, when it is created, and not stored.
"""

import fcntl
import fnmatch
import hashlib
import os
import re
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from shared.errors import InvalidRequest, ModelNotFound, PermissionDenied, StartupError

Scope: TypeAlias = Literal["generate", "cancel", "metrics", "operator"]
"""What a key permits: requests and the reading of their results; cancelling and deleting them;
``/metrics`` and the details of ``/health``; the operator's endpoints under ``/admin/``."""

SCOPES: tuple[Scope, ...] = get_args(Scope)
DEFAULT_SCOPES: tuple[Scope, ...] = ("generate", "cancel")
_PREFIX = "wk"
_ID_BYTES = 5
_ID = re.compile(r"[0-9a-f]{2,32}")
_TENANT = re.compile(r"[A-Za-z0-9._@-]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LABEL = re.compile(r"[^\x00-\x1f\x7f\"\\]{0,128}")
_BEFORE_COMMENT = re.compile(r"""(?:[^"'#\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')*""")
"""What `shlex` reads of a line."""
_MODEL = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._:@/*-]{0,127}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The stored part of a key. A limit of None is no limit."""

    key_id: str
    tenant: str
    digest: str
    created: str
    label: str = ""
    expires: datetime | None = None
    """When the key ceases to be valid."""
    scopes: tuple[Scope, ...] = DEFAULT_SCOPES
    models: tuple[str, ...] = ()
    """The models that it may use, each a name or a pattern with ``*``; all of them if empty."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and of answers."""
    max_concurrent: int | None = None
    """Maximum number of concurrent requests, at all gateways."""
    max_detached: int | None = None
    """Detached requests of the tenant whose jobs have not ended."""
    max_tokens: int | None = None
    """The largest ``max_tokens`` of a request, and that of a request without one."""
    previous: str = ""
    """The digest of the key before its last rotation, which is valid until ``previous_until``."""
    previous_until: datetime | None = None

    @property
    def line(self) -> str:
        """The key's line in the file."""
        words = [self.key_id, self.tenant, self.digest, self.created]
        for field in _OPTIONS:
            value = getattr(self, field)
            if value != _DEFAULTS[field]:
                words.append(f"{field}={_written(value)}")
        return " ".join(words) + "\n"

    @property
    def limits(self) -> dict[str, Any]:
        """What the key is limited to, by field."""
        values = {name: getattr(self, name) for name in _LIMITS}
        return {name: value for name, value in values.items() if value != _DEFAULTS[name]}

    @property
    def has_rates(self) -> bool:
        """Whether it has a limit for each minute."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    @property
    def has_limits(self) -> bool:
        """Whether its requests are counted at all gateways together."""
        return self.has_rates or self.max_concurrent is not None

    def allows_model(self, model: str) -> bool:
        return not self.models or any(fnmatch.fnmatchcase(model, one) for one in self.models)

    def require_model(self, model: str) -> None:
        """Raises `ModelNotFound` unless the key may use the model."""
        if not self.allows_model(model):
            raise ModelNotFound(
                f"The model '{model}' does not exist or you do not have access to it.",
                param="model",
            )

    def limited_tokens(self, wanted: int | None) -> int | None:
        """The ``max_tokens`` of a request that wants this many. Raises `InvalidRequest`."""
        if self.max_tokens is not None and wanted is not None and wanted > self.max_tokens:
            raise InvalidRequest(
                f"max_tokens is too large: {wanted}. This API key permits {self.max_tokens}.",
                param="max_tokens",
            )
        return self.max_tokens if wanted is None else wanted

    def require(self, scope: Scope) -> None:
        """Raises `PermissionDenied` unless the key has this scope."""
        if scope not in self.scopes:
            raise PermissionDenied(
                f"You have insufficient permissions for this operation. Missing scope: {scope}."
            )


def _written(value: object) -> str:
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        case tuple():
            return ",".join(value)
        case str() if not value.isalnum():
            return f'"{value}"'
        case _:
            return str(value)


def _comment(line: str) -> str:
    """The comment at the end of a line, and the spaces before it; empty if it has none."""
    before = _BEFORE_COMMENT.match(line)
    assert before is not None
    return line[len(before.group().rstrip()) :].rstrip()


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if pattern.fullmatch(text) is None:
            raise ValueError(f"expected {pattern.pattern}")
        return text

    return read


def _copy_access(before: os.stat_result, to: int) -> None:
    """Give a file the owner, the group and the mode of another one. Raises `OSError`."""
    now = os.fstat(to)
    if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
        os.fchown(to, before.st_uid, before.st_gid)
    os.fchmod(to, before.st_mode & 0o777)


def _time(text: str) -> datetime:
    """A date, which is its midnight, or a time in ISO 8601; in UTC unless it says otherwise."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("expected a date or a time, such as 2027-01-31") from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _scopes(text: str) -> tuple[Scope, ...]:
    words = text.split(",")
    if unknown := [word for word in words if word not in SCOPES]:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in words)


def _models(text: str) -> tuple[str, ...]:
    return tuple(map(_matching(_MODEL), text.split(",")))


def _limit(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 53:
        raise ValueError("expected a positive number")
    return int(text)


_POSITIONAL: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "key_id": ("ID", _matching(_ID)),
    "tenant": ("TENANT", _matching(_TENANT)),
    "digest": ("SHA256", _matching(_DIGEST)),
    "created": ("CREATED", str),
}
_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "label": _matching(_LABEL),
    "expires": _time,
    "scopes": _scopes,
    "models": _models,
    "requests_per_minute": _limit,
    "tokens_per_minute": _limit,
    "max_concurrent": _limit,
    "max_detached": _limit,
    "max_tokens": _limit,
    "previous": _matching(_DIGEST),
    "previous_until": _time,
}
_DEFAULTS = {field.name: field.default for field in fields(ApiKey)}
_LIMITS = (
    "models",
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    "max_detached",
    "max_tokens",
)


def read_options(options: Mapping[str, str]) -> dict[str, Any]:
    """The values of a key's options by name. Raises ValueError, which names the option."""
    read = {}
    for name, text in options.items():
        if name not in _OPTIONS:
            raise ValueError(f"unknown field {name!r}; expected one of {', '.join(_OPTIONS)}")
        try:
            read[name] = _OPTIONS[name](text)
        except ValueError as error:
            raise ValueError(f"{name}={text}: {error}") from None
    return read


def parse_line(line: str) -> ApiKey | None:
    """The key of a line; None if the line has none. Raises ValueError, which names the field."""
    words = shlex.split(line, comments=True)
    if not words:
        return None
    if len(words) < len(_POSITIONAL):
        raise ValueError("expected ID TENANT SHA256 CREATED")
    values: dict[str, Any] = {}
    for (field, (name, read)), word in zip(_POSITIONAL.items(), words, strict=False):
        try:
            values[field] = read(word)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    options: dict[str, str] = {}
    for word in words[len(_POSITIONAL) :]:
        name, is_set, text = word.partition("=")
        if not is_set:
            raise ValueError(f"{word!r}: expected NAME=VALUE")
        if name in options:
            raise ValueError(f"{name} is given twice")
        options[name] = text
    return ApiKey(**values, **read_options(options))


class KeyFile:
    """The key file. Every method raises `StartupError` if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, ApiKey]:
        """All keys by id. Raises `StartupError`, which names the line and the field."""
        keys, [*faults] = self.examine()
        if faults:
            raise StartupError(faults[0])
        return keys

    def examine(self) -> tuple[dict[str, ApiKey], list[str]]:
        """The keys of the valid lines by id, and what is wrong with the other lines."""
        keys: dict[str, ApiKey] = {}
        faults = []
        for number, line in enumerate(self._text().split("\n"), 1):
            try:
                key = parse_line(line)
                if key is not None and key.key_id in keys:
                    raise ValueError(f"duplicate key id {key.key_id}")  # noqa: TRY301
            except ValueError as error:
                faults.append(f"{self.path}:{number}: the keys cannot be used: {error}")
            else:
                if key is not None:
                    keys[key.key_id] = key
        return keys, faults

    def add(self, tenant: str, **options: Any) -> str:
        """Create a key for a tenant, and the file if necessary; returns the key. ``options`` are
        the fields of `ApiKey` after ``created``."""
        if _TENANT.fullmatch(tenant) is None:
            raise StartupError(f"{tenant!r} is not a valid tenant name: {_TENANT.pattern}")
        key_id = secrets.token_hex(_ID_BYTES)
        key = _new_key(key_id)
        today = datetime.now(UTC).date().isoformat()
        made = ApiKey(key_id, tenant, digest(key), today, **options)
        with self._changing() as lines:
            if lines and not lines[-1].endswith("\n"):
                lines[-1] += "\n"
            lines.append(made.line)
        return key

    def rotate(self, key_id: str, grace: timedelta) -> str:
        """Replace a key by a new one with the same id, which is returned. The old one remains valid
        for ``grace``."""
        key = _new_key(key_id)
        with self._changing() as lines:
            index, old = self._place(lines, key_id)
            new = replace(
                old,
                digest=digest(key),
                previous=old.digest if grace else "",
                previous_until=datetime.now(UTC) + grace if grace else None,
            )
            lines[index] = new.line.rstrip() + _comment(lines[index]) + "\n"
        return key

    def revoke(self, key_id: str) -> ApiKey:
        """Remove a key from the file."""
        with self._changing() as lines:
            index, key = self._place(lines, key_id)
            del lines[index]
        return key

    def _place(self, lines: list[str], key_id: str) -> tuple[int, ApiKey]:
        for index, line in enumerate(lines):
            key = parse_line(line)
            if key is not None and key.key_id == key_id:
                return index, key
        raise StartupError(f"{self.path} has no key {key_id}")

    @contextmanager
    def _changing(self) -> Iterator[list[str]]:
        """The lines of the file, which replace it when they are changed. Others wait meanwhile."""
        path = self.path.resolve()
        try:
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                if path.exists():
                    self.read()
                    before = path.stat()
                    with path.open() as file:
                        lines = list(file)
                else:
                    lines, before = [], None
                yield lines
                new = path.with_name(f".{path.name}.new")
                new.unlink(missing_ok=True)
                handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(handle, "w") as file:
                    file.write("".join(lines))
                    file.flush()
                    if before is not None:  # the gateways can still read it
                        _copy_access(before, file.fileno())
                    os.fsync(file.fileno())
                new.replace(path)
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._unusable(error) from None

    def _text(self) -> str:
        try:
            return self.path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError | UnicodeDecodeError) -> StartupError:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        return StartupError(f"the keys of {self.path} cannot be used: {reason}")


def digest(key: str) -> str:
    """What the file stores of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def id_of(key: str) -> str:
    """The id of a key; empty if it has none."""
    parts = key.split("-", 2)
    return parts[1] if len(parts) == 3 and parts[0] == _PREFIX else ""


def _new_key(key_id: str) -> str:
    return f"{_PREFIX}-{key_id}-{secrets.token_urlsafe(32)}"

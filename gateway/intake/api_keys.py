"""Authentication: the API keys that a gateway accepts, what each permits, and their file.

The file has one line for each key; # starts a comment::

    ID TENANT SHA256 CREATED [NAME=VALUE ...]

    3c5c4c7894 alice 9f86d081... 2026-11-21 label="Web app" scopes=generate requests_per_minute=60

The names are the fields of `ApiKey` after ``created``.
"""

import fnmatch
import hashlib
import hmac
import logging
import re
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from shared.errors import (
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    PermissionDenied,
    StartupError,
)
from shared.settings import GatewaySettings
from shared.telemetry import audit

logger = logging.getLogger(__name__)

Scope: TypeAlias = Literal["generate", "cancel", "metrics", "operator"]
"""What a key permits: requests and the reading of their results; cancelling and deleting them;
``/metrics`` and the details of ``/health``; the operator's endpoints under ``/admin/``."""

SCOPES: tuple[Scope, ...] = get_args(Scope)
DEFAULT_SCOPES: tuple[Scope, ...] = ("generate", "cancel")
PREFIX = "wk"
"""With which each key begins."""
_ID = re.compile(r"[0-9a-f]{2,32}")
TENANT = re.compile(r"[A-Za-z0-9._@-]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LABEL = re.compile(r"[^\x00-\x1f\x7f\"\\]{0,128}")
_MODEL = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._:@/*-]{0,127}")
_LOOK_INTERVAL_S = 1.0
_MAX_REVOKED = 10_000
_NO_DIGEST = "0" * 64
_OPEN_PATHS = frozenset({"/", "/console", "/live", "/health", "/docs", "/openapi.json"})
_OPEN_FOLDERS = ("/docs/assets/", "/console/")
_METRICS = "/metrics"
_OPERATORS = "/admin"


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


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if pattern.fullmatch(text) is None:
            raise ValueError(f"expected {pattern.pattern}")
        return text

    return read


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
    "tenant": ("TENANT", _matching(TENANT)),
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


def read_keys(path: Path) -> dict[str, ApiKey]:
    """All keys of a file by id. Raises `StartupError`, which names the line and the field."""
    keys, [*faults] = examine(path)
    if faults:
        raise StartupError(faults[0])
    return keys


def examine(path: Path) -> tuple[dict[str, ApiKey], list[str]]:
    """The keys of a file's valid lines by id, and what is wrong with the other lines. Raises
    `StartupError` if the file cannot be read."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise unusable(path, error) from None
    keys: dict[str, ApiKey] = {}
    faults = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            key = parse_line(line)
            if key is not None and key.key_id in keys:
                raise ValueError(f"duplicate key id {key.key_id}")  # noqa: TRY301
        except ValueError as error:
            faults.append(f"{path}:{number}: the keys cannot be used: {error}")
        else:
            if key is not None:
                keys[key.key_id] = key
    return keys, faults


def unusable(path: Path, error: OSError | UnicodeDecodeError) -> StartupError:
    reason = error.strerror if isinstance(error, OSError) else "not text"
    return StartupError(f"the keys of {path} cannot be used: {reason}")


def digest(key: str) -> str:
    """What the file stores of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def id_of(key: str) -> str:
    """The id of a key; empty if it has none."""
    parts = key.split("-", 2)
    return parts[1] if len(parts) == 3 and parts[0] == PREFIX else ""


def needs_key(path: str) -> bool:
    """Whether requests for this path need an API key, by default."""
    return path not in _OPEN_PATHS and path != _METRICS and not path.startswith(_OPEN_FOLDERS)


def authorization_of(headers: Mapping[str, str]) -> str:
    """The Authorization header of a request, also if its API key is sent as ``x-api-key``."""
    authorization = headers.get("authorization", "")
    if not authorization and (key := headers.get("x-api-key")):  # Anthropic's clients
        return f"Bearer {key}"
    return authorization


class Keys:
    """The valid keys of a gateway, reloaded when their file changes.

    A file with a fault leaves the keys as they were, but for those whose line is gone, if other
    lines are valid: a revocation takes effect all the same.
    """

    def __init__(
        self, path: Path | None, *, are_metrics_open: bool = True, is_open_to_all: bool = False
    ) -> None:
        """Without a path no key is required, and everyone has all scopes; ``is_open_to_all``: but
        that of operators, because other machines may reach the gateway. Raises `StartupError`."""
        self._path = path
        self._version = self._look()
        self._keys = read_keys(path) if path is not None else {}
        if path is not None and not self._keys:
            logger.warning(
                "there is no API key yet, so no request is accepted", extra={"file": str(path)}
            )
        self._revoked: dict[str, ApiKey] = {}
        """The keys that were revoked since the start, by id, for the audit log."""
        self._looked_at = time.monotonic()
        self._is_broken = False
        scopes = tuple(one for one in SCOPES if one != "operator" or not is_open_to_all)
        self._anonymous = ApiKey("", "", "", "", scopes=scopes)
        self._are_metrics_open = are_metrics_open

    @classmethod
    def of(cls, settings: GatewaySettings) -> "Keys":
        """The keys of a gateway. Raises `StartupError`."""
        return cls(
            settings.keys_file,
            are_metrics_open=settings.open_metrics,
            is_open_to_all=settings.allow_anonymous,
        )

    @property
    def are_needed(self) -> bool:
        return self._path is not None

    @property
    def known(self) -> list[ApiKey]:
        """The keys in force, in the order of their file; none if no key is required."""
        self._refresh()
        return list(self._keys.values())

    @property
    def is_broken(self) -> bool:
        """Whether the file has a fault now, so that older keys are in force."""
        self._refresh()
        return self._is_broken

    def scope_of(self, method: str, path: str) -> Scope | None:
        """The scope that a request needs; None if it needs no key, as probes and documentation
        do."""
        if path == _METRICS:
            return None if self._are_metrics_open else "metrics"
        if not needs_key(path):
            return None
        if path == _OPERATORS or path.startswith(f"{_OPERATORS}/"):
            return "operator"
        is_cancelling = method == "DELETE" or (method == "POST" and path.endswith("/cancel"))
        return "cancel" if is_cancelling else "generate"

    def find(self, authorization: str) -> ApiKey:
        """The key of this Authorization header; if no key is required, one without an id and a
        tenant. Raises `InvalidApiKey`."""
        if self._path is None:
            return self._anonymous
        self._refresh()
        scheme, _, key = authorization.partition(" ")
        known = self._keys.get(id_of(key))
        if not key:
            raise InvalidApiKey(
                "An API key is required. Send the header Authorization: Bearer KEY."
            )
        if not _is_key(key, known) or known is None:
            raise InvalidApiKey("Incorrect API key provided: it is unknown or was revoked.")
        if scheme.lower() != "bearer":
            raise InvalidApiKey("Send the API key in the header Authorization: Bearer KEY.")
        if known.expires is not None and known.expires <= datetime.now(UTC):
            raise InvalidApiKey("This API key has expired.")
        return known

    def permit(self, authorization: str, scope: Scope) -> bool:
        """Whether `find` returns a key that has this scope."""
        try:
            self.find(authorization).require(scope)
        except (InvalidApiKey, PermissionDenied):
            return False
        return True

    def with_id(self, key_id: str) -> ApiKey | None:
        """The key that has this id, which may have expired; None if there is none."""
        self._refresh()
        return self._keys.get(key_id)

    def named(self, authorization: str) -> ApiKey | None:
        """The key that has the id of this Authorization header, which may still be another key. It
        may have expired, or have been revoked since the start."""
        key_id = id_of(authorization.partition(" ")[2])
        return self._keys.get(key_id) or self._revoked.get(key_id)

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked_at < _LOOK_INTERVAL_S:
            return
        self._looked_at = now
        version = self._look()
        if version == self._version:
            return
        self._version = version
        try:
            keys, faults = examine(self._path)
        except StartupError as error:
            keys, faults = {}, [error.message]
        self._is_broken = bool(faults)
        if not faults:
            self._replace(keys)
            return
        revoked = sorted(self._keys.keys() - self._mentioned()) if keys else []
        left = {one: key for one, key in self._keys.items() if one not in revoked}
        self._replace(left)
        facts = {"reason": faults[0], "num_faults": len(faults), "revoked": revoked}
        logger.error("API keys not reloaded, the last good ones stay in force", extra=facts)

    def _replace(self, keys: dict[str, ApiKey]) -> None:
        self._record_change(keys)
        self._revoked |= {one: key for one, key in self._keys.items() if one not in keys}
        for oldest in list(self._revoked)[:-_MAX_REVOKED]:
            del self._revoked[oldest]
        self._keys = keys

    def _record_change(self, keys: dict[str, ApiKey]) -> None:
        """Record what becomes different with other ``keys``."""
        for key_id in sorted(self._keys.keys() | keys.keys()):
            old, new = self._keys.get(key_id), keys.get(key_id)
            key = new or old
            if key is not None and old != new:
                change = "added" if old is None else "revoked" if new is None else "changed"
                audit.record("API key changed", tenant=key.tenant, key_id=key_id, change=change)

    def _mentioned(self) -> set[str]:
        """The ids with which a line of the file begins, whether or not it is valid."""
        assert self._path is not None
        with suppress(OSError, UnicodeDecodeError):
            lines = self._path.read_text().split("\n")
            return {words[0] for line in lines if (words := line.split())}
        return set(self._keys)

    def _look(self) -> tuple[int, int, int] | None:
        """A fingerprint of the file's metadata, which changes whenever the file does."""
        with suppress(OSError):
            if self._path is not None:
                stat = self._path.stat()
                return stat.st_mtime_ns, stat.st_size, stat.st_ino
        return None


def _is_key(key: str, known: ApiKey | None) -> bool:
    """Whether this is the current key, or the one before its rotation while that is valid. It takes
    the same time for any key."""
    now, given = datetime.now(UTC), digest(key)
    current = known.digest if known is not None else _NO_DIGEST
    is_previous_valid = (
        known is not None and known.previous_until is not None and now < known.previous_until
    )
    previous = known.previous if known is not None and is_previous_valid else _NO_DIGEST
    is_current = hmac.compare_digest(given, current)
    is_previous = hmac.compare_digest(given, previous)
    return is_current or is_previous

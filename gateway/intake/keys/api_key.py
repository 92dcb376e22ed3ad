"""An API key: its tenant, what it permits, its limits, and its line in the file of keys.

A line has these words; # starts a comment::

    ID TENANT SHA256 CREATED [NAME=VALUE ...]

    3c5c4c7894 alice 9f86d081... 2026-11-21 label="Web app" scopes=generate requests_per_minute=60

The names are the fields of `ApiKey` after ``created``.
"""

import fnmatch
import hashlib
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

from gateway.intake.keys.tenant_limits import NO_LIMITS, Account, TenantLimits, account_of
from shared.errors import InvalidRequest, ModelNotFound, PermissionDenied

Scope: TypeAlias = Literal["generate", "cancel", "metrics", "operator"]
"""What a key permits: requests and the reading of their results; cancelling and deleting them;
``/metrics`` and the details of ``/health``; the operator's endpoints under ``/admin/``."""

Cache: TypeAlias = Literal["", "exact"]
"""Whether equal requests are computed once."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
DEFAULT_SCOPES: tuple[Scope, ...] = ("generate", "cancel")
PREFIX = "wk"
"""The beginning of each key."""
_ID = re.compile(r"[0-9a-f]{2,32}")
TENANT = re.compile(r"[A-Za-z0-9._@-]{1,128}")
_ID_BYTES = 5
_MAX_PARSED = 1 << 14
"""Lines of files whose keys are remembered."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LABEL = re.compile(r"[^\x00-\x1f\x7f\"\\]{0,128}")
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
    """Maximum number of tokens per minute, of prompts and answers together."""
    max_concurrent: int | None = None
    """Maximum number of concurrent requests, at all gateways."""
    max_detached: int | None = None
    """Detached requests of the tenant whose jobs have not ended."""
    max_tokens: int | None = None
    """The largest ``max_tokens`` of a request, and the value for a request without
    ``max_tokens``."""
    receipts: bool = False
    """Whether all answers have a receipt, as if each request had ``receipt``."""
    cache: Cache = ""
    """``exact``: equal requests are computed once, as if each request asked for it."""
    previous: str = ""
    """The digest of the key before its last rotation, which is valid until ``previous_until``."""
    previous_until: datetime | None = None
    of_tenant: TenantLimits = field(default=NO_LIMITS, compare=False)
    """The limits of the tenant, which are no part of the key's line."""
    person: str = field(default="", compare=False)
    """The name of the person who has signed in, for whom there is no key; empty for a key."""

    @property
    def line(self) -> str:
        """The key's line in the file."""
        words = [self.key_id, self.tenant, self.digest, self.created]
        for option in _OPTIONS:
            value = getattr(self, option)
            if value != _DEFAULTS[option]:
                words.append(f"{option}={_written(value)}")
        return " ".join(words) + "\n"

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of the key, by field."""
        values = {name: getattr(self, name) for name in _LIMITS}
        return {name: value for name, value in values.items() if value != _DEFAULTS[name]}

    @property
    def accounts(self) -> tuple[Account, ...]:
        """Whose use its requests add to: its own and, if the tenant has limits, the tenant's."""
        own = Account(
            self.key_id,
            "this API key",
            self.requests_per_minute,
            self.tokens_per_minute,
            self.max_concurrent,
        )
        if not self.of_tenant.are_counted:
            return (own,)
        return own, account_of(self.tenant, self.of_tenant)

    @property
    def has_rates(self) -> bool:
        """Whether it or its tenant has a limit for each minute."""
        return self._has_any("requests_per_minute", "tokens_per_minute")

    @property
    def has_limits(self) -> bool:
        """Whether its requests are counted at all gateways together."""
        return self.has_rates or self.limits_concurrency

    @property
    def limits_concurrency(self) -> bool:
        """Whether it or its tenant may have only so many requests at once."""
        return self._has_any("max_concurrent")

    @property
    def counts_jobs(self) -> bool:
        """Whether its requests count until their jobs have ended."""
        return self._has_any("tokens_per_minute", "max_concurrent")

    @property
    def max_total_tokens(self) -> int | None:
        """The most tokens that a request can ever have."""
        limits = (self.tokens_per_minute, self.of_tenant.tokens_per_minute)
        return min((limit for limit in limits if limit is not None), default=None)

    def _has_any(self, *names: str) -> bool:
        has = (getattr(one, name) is not None for one in (self, self.of_tenant) for name in names)
        return any(has)

    def allows_model(self, model: str) -> bool:
        return not self.models or any(fnmatch.fnmatchcase(model, one) for one in self.models)

    def require_model(self, model: str) -> None:
        """Raises `ModelNotFound` unless the key may use the model."""
        if not self.allows_model(model):
            raise ModelNotFound(
                f"The model '{model}' does not exist or you do not have access to it.",
                param="model",
            )

    def limited_tokens(self, wanted: int | None, param: str) -> int | None:
        """The ``max_tokens`` of a request that wants this many with its parameter ``param``. Raises
        `InvalidRequest`."""
        if self.max_tokens is not None and wanted is not None and wanted > self.max_tokens:
            raise InvalidRequest(
                f"{param} is too large: {wanted}. This API key permits {self.max_tokens}.",
                param=param,
            )
        return self.max_tokens if wanted is None else wanted

    @property
    def has_expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC) >= self.expires

    def permits(self, scope: Scope) -> bool:
        """Whether the key is valid now and has this scope."""
        return scope in self.scopes and not self.has_expired

    def require(self, scope: Scope) -> None:
        """Raises `PermissionDenied` unless the key has this scope."""
        if scope not in self.scopes:
            raise PermissionDenied(
                f"You have insufficient permissions for this operation. Missing scope: {scope}."
            )


def _written(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
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
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except ValueError:
        raise ValueError("expected a date or a time, such as 2027-01-31") from None
    except OverflowError:
        raise ValueError("expected a year from 1 to 9999 in UTC") from None


def _scopes(text: str) -> tuple[Scope, ...]:
    words = text.split(",")
    if unknown := [word for word in words if word not in SCOPES]:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in words)


def _models(text: str) -> tuple[str, ...]:
    return tuple(map(_matching(_MODEL), text.split(",")))


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("expected true or false")
    return text.lower() == "true"


def _cache(text: str) -> Cache:
    if text != "exact":
        raise ValueError("expected exact")
    return "exact"


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
    "receipts": _flag,
    "cache": _cache,
    "previous": _matching(_DIGEST),
    "previous_until": _time,
}
SETTABLE = tuple(name for name in _OPTIONS if not name.startswith("previous"))
"""The fields that an operator chooses."""
_DEFAULTS = {one.name: one.default for one in fields(ApiKey)}
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


@lru_cache(_MAX_PARSED)  # a file is read again for every change, which concerns few of its lines
def parse_line(line: str) -> ApiKey | None:
    """The key of a line; None if the line has none. Raises ValueError, which names the field."""
    words = shlex.split(line, comments=True)
    if not words:
        return None
    if len(words) < len(_POSITIONAL):
        raise ValueError("expected ID TENANT SHA256 CREATED")
    values: dict[str, Any] = {}
    for (attribute, (name, read)), word in zip(_POSITIONAL.items(), words, strict=False):
        try:
            values[attribute] = read(word)
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


def new_key(tenant: str, **options: Any) -> tuple[str, ApiKey]:
    """Create a key for a tenant; returns the secret, and the key as it is stored. ``options`` are
    the fields of `ApiKey` after ``created``. Raises ValueError for the name of a tenant."""
    if TENANT.fullmatch(tenant) is None:
        raise ValueError(f"{tenant!r} is not a valid tenant name: {TENANT.pattern}")
    key_id = secrets.token_hex(_ID_BYTES)
    secret = _new_secret(key_id)
    today = datetime.now(UTC).date().isoformat()
    return secret, ApiKey(key_id, tenant, digest(secret), today, **options)


def rotated(old: ApiKey, grace: timedelta) -> tuple[str, ApiKey]:
    """A new secret for a key, and the key with it. The old secret remains valid for ``grace``."""
    secret = _new_secret(old.key_id)
    return secret, replace(
        old,
        digest=digest(secret),
        previous=old.digest if grace else "",
        previous_until=datetime.now(UTC) + grace if grace else None,
    )


def _new_secret(key_id: str) -> str:
    return f"{PREFIX}-{key_id}-{secrets.token_urlsafe(32)}"


def digest(key: str) -> str:
    """The digest of a key, which the file stores."""
    return hashlib.sha256(key.encode()).hexdigest()


def id_of(key: str) -> str:
    """The id of a key; empty if it has none."""
    parts = key.split("-", 2)
    return parts[1] if len(parts) == 3 and parts[0] == PREFIX else ""

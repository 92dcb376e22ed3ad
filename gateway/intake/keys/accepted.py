"""Authentication: the API keys that a gateway accepts, and the scope that each request needs."""

import hmac
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from gateway.intake.keys.api_key import SCOPES, ApiKey, Scope, digest, id_of
from gateway.intake.keys.key_file import examine, read_keys
from gateway.intake.keys.tenant_limits import NO_LIMITS, TenantLimits
from shared.errors import InvalidApiKey, PermissionDenied, StartupError, Unavailable
from shared.settings import GatewaySettings
from shared.telemetry import audit

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
"""Seconds after which it is looked again whether the file has changed."""
_MAX_REVOKED = 10_000
_STORED_VALID_S = 3600.0
"""Seconds for which keys of the database stay valid while it cannot be read: a revocation may be
missed for so long, but requests that need no database go on."""
_NO_DIGEST = "0" * 64
_OPEN_PATHS = frozenset({"/", "/console", "/live", "/health", "/docs", "/openapi.json"})
_OPEN_FOLDERS = ("/docs/assets/", "/console/", "/.well-known/")
_METRICS = "/metrics"
_OPERATORS = "/admin"


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

    Keys of the database are valid, too. `gateway.tenants.key_directory` reads them, and the limits
    of tenants, which keys of the file have as well. While it cannot, the keys that it has read stay
    valid for an hour.

    If the file becomes invalid, the current keys stay in force. Keys whose lines are gone are still
    revoked if other lines are valid.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        is_open_to_all: bool = False,
        stored_valid_s: float = _STORED_VALID_S,
        look_interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        """Without a path no key is required, and everyone has all scopes. With ``is_open_to_all``
        nobody has the scope ``operator``, because other machines may reach the gateway. Raises
        `StartupError`."""
        self._stored_valid_s = stored_valid_s
        self._look_interval_s = look_interval_s
        self._path = path
        self._version = self._look()
        self._keys = read_keys(path) if path is not None else {}
        self._of_file = self._keys
        self._stored: Mapping[str, ApiKey] = {}
        self._tenants: Mapping[str, TenantLimits] = {}
        self._stored_until = math.inf
        """The time of `time.monotonic` until which the keys that were read from the database are
        valid."""
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

    @classmethod
    def of(cls, settings: GatewaySettings, look_interval_s: float = LOOK_INTERVAL_S) -> "Keys":
        """The keys of a gateway. Raises `StartupError`."""
        return cls(
            settings.keys_file,
            is_open_to_all=settings.allow_anonymous,
            look_interval_s=look_interval_s,
        )

    @property
    def are_needed(self) -> bool:
        return self._path is not None

    @property
    def known(self) -> list[ApiKey]:
        """The keys in force. The keys of the file come first, in its order; none if no key is
        required."""
        self._refresh()
        return list(self._keys.values())

    def is_in_file(self, key_id: str) -> bool:
        self._refresh()
        return key_id in self._of_file

    def expect_stored(self) -> None:
        """Note that the database has keys that are not read yet, so a key that is not in the file
        may be in the database."""
        self._stored_until = -math.inf

    @property
    def tenants(self) -> Mapping[str, TenantLimits]:
        """The tenants that have limits."""
        return self._tenants

    def limits_of(self, tenant: str) -> TenantLimits:
        return self._tenants.get(tenant, NO_LIMITS)

    def accept_stored(
        self, keys: Mapping[str, ApiKey], tenants: Mapping[str, TenantLimits]
    ) -> None:
        """Accept exactly these keys of the database, within these limits of their tenants. A key of
        the file with the same id takes precedence."""
        self._stored, self._tenants = keys, tenants
        self._replace(self._of_file)
        self.confirm_stored()

    def confirm_stored(self) -> None:
        """Note that the keys that were read from the database are still up to date."""
        self._stored_until = time.monotonic() + self._stored_valid_s

    @property
    def is_broken(self) -> bool:
        """Whether the file has a fault now, so that older keys are in force."""
        self._refresh()
        return self._is_broken

    def scope_of(self, method: str, path: str) -> Scope | None:
        """The scope that a request needs; None if it needs no key, as probes and documentation
        do."""
        if path == _METRICS:
            self._refresh()
            is_closed = any("metrics" in key.scopes for key in self._keys.values())
            return "metrics" if is_closed else None
        if not needs_key(path):
            return None
        if path == _OPERATORS or path.startswith(f"{_OPERATORS}/"):
            return "operator"
        is_cancelling = method == "DELETE" or (method == "POST" and path.endswith("/cancel"))
        return "cancel" if is_cancelling else "generate"

    def find(self, authorization: str) -> ApiKey:
        """The key of this Authorization header; if no key is required, a key without an id and a
        tenant. Raises `InvalidApiKey`, and `Unavailable` while the key may be in the database but
        the database cannot be read."""
        if self._path is None:
            return self._anonymous
        self._refresh()
        scheme, _, key = authorization.partition(" ")
        key_id = id_of(key)
        known = self._keys.get(key_id)
        if not key:
            raise InvalidApiKey(
                "An API key is required. Send the header Authorization: Bearer KEY."
            )
        if key_id and key_id not in self._of_file and time.monotonic() > self._stored_until:
            raise Unavailable("API keys cannot be checked now, because the database is away.")
        if not _is_key(key, known) or known is None:
            raise InvalidApiKey("Incorrect API key provided: it is unknown or was revoked.")
        if scheme.lower() != "bearer":
            raise InvalidApiKey("Send the API key in the header Authorization: Bearer KEY.")
        if known.has_expired:
            raise InvalidApiKey("This API key has expired.")
        return known

    def permit(self, authorization: str, scope: Scope) -> bool:
        """Whether `find` returns a key that has this scope."""
        try:
            self.find(authorization).require(scope)
        except (InvalidApiKey, PermissionDenied, Unavailable):
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
        if self._path is None or now - self._looked_at < self._look_interval_s:
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
        revoked = sorted(self._of_file.keys() - self._mentioned()) if keys else []
        left = {one: key for one, key in self._of_file.items() if one not in revoked}
        self._replace(left)
        fields = {"reason": faults[0], "num_faults": len(faults), "revoked": revoked}
        logger.error("API keys not reloaded", extra=fields)

    def _replace(self, of_file: dict[str, ApiKey]) -> None:
        """Accept these keys of the file, and the keys of the database."""
        self._of_file = of_file
        keys = of_file | {one: key for one, key in self._stored.items() if one not in of_file}
        keys = {one: self._within_limits(key) for one, key in keys.items()}
        self._record_change(keys)
        self._revoked |= {one: key for one, key in self._keys.items() if one not in keys}
        for oldest in list(self._revoked)[:-_MAX_REVOKED]:
            del self._revoked[oldest]
        self._keys = keys

    def _within_limits(self, key: ApiKey) -> ApiKey:
        of_tenant = self.limits_of(key.tenant)
        return key if of_tenant is key.of_tenant else replace(key, of_tenant=of_tenant)

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
        return set(self._of_file)

    def _look(self) -> tuple[int, int, int] | None:
        """A fingerprint of the file's metadata, which changes whenever the file does."""
        with suppress(OSError):
            if self._path is not None:
                stat = self._path.stat()
                return stat.st_mtime_ns, stat.st_size, stat.st_ino
        return None


def _is_key(key: str, known: ApiKey | None) -> bool:
    """Whether this is the current key, or the key before its rotation while that key is valid. It
    takes the same time for any key."""
    now, given = datetime.now(UTC), digest(key)
    current = known.digest if known is not None else _NO_DIGEST
    is_previous_valid = (
        known is not None and known.previous_until is not None and now < known.previous_until
    )
    previous = known.previous if known is not None and is_previous_valid else _NO_DIGEST
    is_current = hmac.compare_digest(given, current)
    is_previous = hmac.compare_digest(given, previous)
    return is_current or is_previous

"""API keys and their tenants.

The file has one line for each key, ``ID TENANT SHA256 CREATED [scopes=SCOPE,...]``; # starts a
comment. A key has 256 random bits, so a fast hash like SHA-256 is sufficient. It is shown once,
when it is created, and not stored.
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from shared.errors import InvalidApiKey, StartupError

logger = logging.getLogger(__name__)

_PREFIX = "wk"
_ID_BYTES = 5
_LINE = re.compile(
    r"(?P<key_id>[0-9a-f]+) +(?P<tenant>[A-Za-z0-9._@-]{1,128}) +(?P<digest>[0-9a-f]{64}) +"
    r"(?P<created>\S+)(?: +scopes=(?P<scopes>[a-z,]+))?"
)
_TENANT = re.compile(r"[A-Za-z0-9._@-]{1,128}")
_LOOK_INTERVAL_S = 1.0
_NO_DIGEST = "0" * 64
_OPEN_PATHS = frozenset({"/", "/live", "/health", "/metrics", "/docs", "/openapi.json"})
_OPEN_FOLDERS = ("/docs/assets/", "/console/")


def needs_key(path: str) -> bool:
    """Whether requests for this path need an API key. Probes, metrics, documentation and the page
    of the console do not."""
    return path not in _OPEN_PATHS and not path.startswith(_OPEN_FOLDERS)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The stored part of a key."""

    key_id: str
    tenant: str
    digest: str
    created: str
    scopes: tuple[str, ...] = ()
    """What the key permits; ``operator`` is the only one that counts."""

    @property
    def line(self) -> str:
        scopes = f" scopes={','.join(self.scopes)}" if self.scopes else ""
        return f"{self.key_id} {self.tenant} {self.digest} {self.created}{scopes}\n"

    @property
    def is_operator(self) -> bool:
        return "operator" in self.scopes


class KeyFile:
    """The key file, for commands that manage it. Every method raises `StartupError` if the file
    cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, ApiKey]:
        """All keys by id."""
        return {key.key_id: key for key in self._parse(self._text())}

    def add(self, tenant: str, scopes: tuple[str, ...] = ()) -> str:
        """Create a key for a tenant, and the file if necessary; returns the key."""
        if _TENANT.fullmatch(tenant) is None:
            raise StartupError(f"{tenant!r} is not a valid tenant name: {_TENANT.pattern}")
        if self.path.exists():
            self.read()
        key_id = secrets.token_hex(_ID_BYTES)
        key = f"{_PREFIX}-{key_id}-{secrets.token_urlsafe(32)}"
        created = datetime.now(UTC).date().isoformat()
        made = ApiKey(key_id, tenant, _digest(key), created, scopes)
        try:
            # A single short write in append mode, so that concurrent commands lose nothing.
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(made.line)
        except OSError as error:
            raise self._unusable(error) from None
        return key

    def revoke(self, key_id: str) -> ApiKey:
        """Remove a key from the file."""
        text = self._text()
        revoked = {key.key_id: key for key in self._parse(text)}.get(key_id)
        if revoked is None:
            raise StartupError(f"{self.path} has no key {key_id}")
        kept = [line for line in text.splitlines(keepends=True) if line.split()[:1] != [key_id]]
        new = self.path.with_name(f".{self.path.name}.new")
        try:
            new.write_text("".join(kept))
            new.chmod(self.path.stat().st_mode & 0o777)
            new.replace(self.path)
        except OSError as error:
            raise self._unusable(error) from None
        return revoked

    def _text(self) -> str:
        try:
            return self.path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise self._unusable(error) from None

    def _parse(self, text: str) -> Iterator[ApiKey]:
        for number, line in enumerate(text.splitlines(), 1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            match = _LINE.fullmatch(content)
            if match is None:
                raise StartupError(f"{self.path}:{number}: expected ID TENANT SHA256 CREATED")
            fields = match.groupdict(default="")
            scopes = tuple(filter(None, fields.pop("scopes").split(",")))
            yield ApiKey(**fields, scopes=scopes)

    def _unusable(self, error: OSError | UnicodeDecodeError) -> StartupError:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        return StartupError(f"the keys of {self.path} cannot be used: {reason}")


class Keys:
    """The valid keys of a gateway, reloaded when their file changes."""

    def __init__(self, path: Path | None) -> None:
        """Without a path no key is required. Raises `StartupError`."""
        self._file = KeyFile(path) if path is not None else None
        self._version = self._look()
        self._keys = self._file.read() if self._file is not None else {}
        self._looked_at = time.monotonic()

    @property
    def are_needed(self) -> bool:
        return self._file is not None

    def tenant_of(self, authorization: str) -> str:
        """The tenant of this Authorization header; empty if no key is required. Raises
        `InvalidApiKey`."""
        known = self.key_of(authorization)
        return "" if known is None else known.tenant

    def key_of(self, authorization: str) -> ApiKey | None:
        """The key of this Authorization header; None if no key is required. Raises
        `InvalidApiKey`."""
        if self._file is None:
            return None
        self._refresh(self._file)
        scheme, _, key = authorization.partition(" ")
        known = self._keys.get(_id_of(key))
        digest = known.digest if known is not None else _NO_DIGEST
        if not key:
            raise InvalidApiKey(
                "An API key is required. Send the header Authorization: Bearer KEY."
            )
        if not hmac.compare_digest(_digest(key), digest) or known is None:
            raise InvalidApiKey("Incorrect API key provided: it is unknown or was revoked.")
        if scheme.lower() != "bearer":
            raise InvalidApiKey("Send the API key in the header Authorization: Bearer KEY.")
        return known

    def _refresh(self, file: KeyFile) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_INTERVAL_S:
            return
        self._looked_at = now
        version = self._look()
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = file.read()
        except StartupError as error:
            logger.error("API keys not reloaded", extra={"reason": error.message})  # noqa: TRY400

    def _look(self) -> tuple[int, int, int] | None:
        """A fingerprint of the file's metadata, which changes whenever the file does."""
        with suppress(OSError):
            if self._file is not None:
                stat = self._file.path.stat()
                return stat.st_mtime_ns, stat.st_size, stat.st_ino
        return None


def _id_of(key: str) -> str:
    parts = key.split("-", 2)
    return parts[1] if len(parts) == 3 and parts[0] == _PREFIX else ""


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()

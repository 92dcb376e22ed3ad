"""API keys: who may ask, and for which tenant.

The file has one line for each key, ``ID TENANT SHA256 CREATED``; what follows a # is a remark. A
key is random, 256 bits, so that its hash can be as fast as SHA-256 is. It is shown once, when it is
made, and stands nowhere.
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
    r"(?P<created>\S+)"
)
_TENANT = re.compile(r"[A-Za-z0-9._@-]{1,128}")
_LOOK_INTERVAL_S = 1.0
_NO_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key."""

    key_id: str
    tenant: str
    digest: str
    created: str

    @property
    def line(self) -> str:
        return f"{self.key_id} {self.tenant} {self.digest} {self.created}\n"


class KeyFile:
    """The file, for whoever manages it. Every method raises `StartupError` for a file that cannot
    be used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, ApiKey]:
        """All keys by id."""
        return {key.key_id: key for key in self._parse(self._text())}

    def add(self, tenant: str) -> str:
        """Make a key of a tenant, and the file where there is none; returns the key."""
        if _TENANT.fullmatch(tenant) is None:
            raise StartupError(f"{tenant!r} is not the name of a tenant: {_TENANT.pattern}")
        if self.path.exists():
            self.read()
        key_id = secrets.token_hex(_ID_BYTES)
        key = f"{_PREFIX}-{key_id}-{secrets.token_urlsafe(32)}"
        made = ApiKey(key_id, tenant, _digest(key), datetime.now(UTC).date().isoformat())
        try:
            # One short write at the file's end: two commands at once lose nothing.
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(made.line)
        except OSError as error:
            raise self._unusable(error) from None
        return key

    def revoke(self, key_id: str) -> ApiKey:
        """Take a key out of the file."""
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
                raise StartupError(f"{self.path}:{number}: not ID TENANT SHA256 CREATED")
            yield ApiKey(**match.groupdict())

    def _unusable(self, error: OSError | UnicodeDecodeError) -> StartupError:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        return StartupError(f"the keys of {self.path} cannot be used: {reason}")


class Keys:
    """The keys that a gateway honours, read again when their file changes."""

    def __init__(self, path: Path | None) -> None:
        """Without a path nobody needs a key. Raises `StartupError`."""
        self._file = KeyFile(path) if path is not None else None
        self._version = self._look()
        self._keys = self._file.read() if self._file is not None else {}
        self._looked_at = time.monotonic()

    @property
    def are_needed(self) -> bool:
        return self._file is not None

    def tenant_of(self, authorization: str) -> str:
        """Whose request bears this header; empty where nobody needs a key. Raises
        `InvalidApiKey`."""
        if self._file is None:
            return ""
        self._refresh(self._file)
        scheme, _, key = authorization.partition(" ")
        known = self._keys.get(_id_of(key))
        digest = known.digest if known is not None else _NO_DIGEST
        if not key:
            raise InvalidApiKey("This needs an API key: Authorization: Bearer KEY.")
        if not hmac.compare_digest(_digest(key), digest) or known is None:
            raise InvalidApiKey("This API key is not known.")
        if scheme.lower() != "bearer":
            raise InvalidApiKey("The API key must come as Authorization: Bearer KEY.")
        return known.tenant

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
            logger.error("API keys not read again", extra={"reason": error.message})  # noqa: TRY400

    def _look(self) -> tuple[int, int, int] | None:
        """Changes whenever the file does."""
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

"""Requests that their client may send twice: ``Idempotency-Key``.

The key decides the request's id, so that every gateway finds the same log for it, and the body's
hash in the log tells a retry from another request. The rest is in `gateway.logs.relays`.
"""

import hashlib
import re

from shared.errors import InvalidRequest

HEADER = "Idempotency-Key"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


def check_key(key: str) -> str:
    """Return a key that can be one. Raises `InvalidRequest`."""
    if _KEY.fullmatch(key) is None:
        raise InvalidRequest(f"{HEADER}: expected 1 to 255 visible ASCII characters.", param=HEADER)
    return key


def hash_body(body: bytes) -> str:
    """What two requests of one key have in common if one of them is a retry."""
    return hashlib.sha256(body).hexdigest()

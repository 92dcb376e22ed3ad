"""Signs receipts and checks their signatures.

A receipt is canonical JSON (RFC 8785), signed as a compact JWS (RFC 7515) with Ed25519 (RFC 9864).
The keys are in a single file in PEM. The first key signs; the public parts of all keys are
published, so that receipts that an earlier key signed stay valid.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import rfc8785
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import KeySet, OKPKey

from shared.errors import InvalidRequest, StartupError, Unavailable
from shared.messages import Receipt
from shared.settings import secret_in

ALGORITHM = "Ed25519"
TYPE = "warren-receipt"
_BLOCK = re.compile(r"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----", re.DOTALL)
_MAX_EXACT = 1 << 53
_DECODER = msgspec.json.Decoder(Receipt)


class InvalidReceipt(Exception):
    """A receipt whose signature or content does not hold; the message says why."""


class ReceiptKeys:
    """The keys of a deployment that sign receipts."""

    def __init__(self, keys: Sequence[OKPKey]) -> None:
        """The first key signs, and has a private part."""
        self._keys = keys

    @classmethod
    def of(cls, path: Path | None) -> "ReceiptKeys":
        """The keys of a file; none without a file. Raises `StartupError`."""
        if path is None:
            return cls(())
        keys = [_imported(block[0], path) for block in _BLOCK.finditer(secret_in(path))]
        if not keys:
            raise StartupError(
                f"{path} contains no key in PEM: `openssl genpkey -algorithm ed25519` makes one"
            )
        if not keys[0].is_private:
            raise StartupError(f"{path}: the first key is public and cannot sign receipts")
        return cls(keys)

    def require(self) -> None:
        """Raise `InvalidRequest` if there are no keys."""
        if not self._keys:
            raise InvalidRequest(
                "receipt: this gateway has no key to sign receipts with; its operator sets "
                "WARREN_RECEIPT_KEYS_FILE.",
                param="receipt",
            )

    def sign(self, receipt: Receipt) -> str:
        """The receipt as a compact JWS. Raises `Unavailable` if there are no keys."""
        if not self._keys:  # another gateway has accepted the request
            raise Unavailable("This gateway has no key to sign the receipt with.")
        key = self._keys[0]
        header = {"alg": ALGORITHM, "kid": key.thumbprint(), "typ": TYPE}
        return jws.serialize_compact(header, canonical(receipt), key, algorithms=[ALGORITHM])

    def published(self) -> dict[str, Any]:
        """The public parts as a JWK Set (RFC 7517)."""
        return {"keys": [_public(key) for key in self._keys]}


def canonical(receipt: Receipt) -> bytes:
    """A receipt as canonical JSON."""
    return rfc8785.dumps(msgspec.to_builtins(receipt, str_keys=True))


def verified(text: str, published: Mapping[str, Any]) -> Receipt:
    """The receipt in a compact JWS that a key of the JWK Set ``published`` has signed.

    Raises `InvalidReceipt`.
    """
    try:
        keys = KeySet.import_key_set({"keys": list(published["keys"])})
    except (JoseError, KeyError, TypeError, ValueError) as error:
        raise InvalidReceipt(f"the published keys are not a JWK Set: {error}") from None
    try:
        signed = jws.deserialize_compact(text, keys, algorithms=[ALGORITHM])
    except (JoseError, ValueError) as error:
        raise InvalidReceipt(f"its signature does not hold: {error}") from None
    if signed.headers().get("typ") != TYPE:
        raise InvalidReceipt("it is signed, but it is not a receipt")
    try:
        receipt = _DECODER.decode(signed.payload)
    except msgspec.MsgspecError as error:
        raise InvalidReceipt(f"it is signed, but it is not a receipt: {error}") from None
    if canonical(receipt) != signed.payload:
        raise InvalidReceipt("it has fields that this version of Warren does not know")
    return receipt


def hash_request(body: bytes) -> str:
    """The SHA-256 hash of a request's body as canonical JSON, which depends neither on spaces nor
    on the order of fields. Raises `InvalidRequest`.

    Integers that a double cannot hold are rounded, as RFC 8785 says.
    """
    try:
        value = json.loads(body, parse_int=_rounded)
        return hashlib.sha256(rfc8785.dumps(value)).hexdigest()
    except (ValueError, RecursionError, OverflowError) as error:
        raise InvalidRequest(
            f"receipt: the request has no canonical JSON: {error}", param="receipt"
        ) from None


def _rounded(digits: str) -> int | float:
    number = int(digits)
    return number if abs(number) < _MAX_EXACT else float(number)


def _imported(block: str, path: Path) -> OKPKey:
    try:
        key = OKPKey.import_key(block)
    except (JoseError, ValueError, TypeError) as error:
        raise StartupError(f"{path}: a key cannot be read: {error}") from None
    if key.as_dict(private=False)["crv"] != "Ed25519":
        raise StartupError(f"{path}: a key is not an Ed25519 key")
    return key


def _public(key: OKPKey) -> dict[str, Any]:
    public = key.as_dict(private=False)
    return {**public, "kid": key.thumbprint(), "use": "sig", "alg": ALGORITHM}

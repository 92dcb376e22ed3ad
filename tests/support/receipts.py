"""Keys that sign receipts, and the receipts that they have signed."""

from pathlib import Path
from typing import Any

from joserfc.jwk import OKPKey

from gateway.intake.receipts import verified
from shared.messages import Receipt
from tests.support.gateway.http import LiveGateway


def new_signing_key(directory: Path) -> Path:
    """A file with a new key."""
    path = directory / "receipts.pem"
    path.write_bytes(OKPKey.generate_key("Ed25519").as_pem(private=True))
    return path


async def keys_of(gateway: LiveGateway) -> dict[str, Any]:
    """The public keys."""
    keys: dict[str, Any] = (await gateway.http.get("/.well-known/jwks.json")).json()
    return keys


async def receipt_of(gateway: LiveGateway, signed: str) -> Receipt:
    """The receipt, whose signature is checked."""
    return verified(signed, await keys_of(gateway))

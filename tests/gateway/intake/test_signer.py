"""What the gateways' shared secret signs."""

import time

import pytest

from gateway.intake.signer import Signer, derive_key

SIGNER = Signer(b"s" * 32)
ID = "chatcmpl-" + "0" * 32


def test_keys_are_derived_as_in_rfc_5869() -> None:
    """Its third test vector."""
    expected = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"

    assert derive_key(b"\x0b" * 22, "").hex() == expected


def test_each_purpose_has_a_key_of_its_own() -> None:
    assert derive_key(b"s" * 32, "one") != derive_key(b"s" * 32, "other")


def test_a_token_permits_one_verb_on_one_stream() -> None:
    token = SIGNER.stream_token(ID, "read", time.time() + 60)

    assert SIGNER.is_stream_token(ID, "read", token)
    assert not SIGNER.is_stream_token(ID, "cancel", token)
    assert not SIGNER.is_stream_token(ID[:-1] + "1", "read", token)
    assert not Signer(b"t" * 32).is_stream_token(ID, "read", token)


def test_a_token_expires() -> None:
    assert not SIGNER.is_stream_token(ID, "read", SIGNER.stream_token(ID, "read", time.time() - 1))


def test_an_expiry_cannot_be_changed() -> None:
    expiry, _, signature = SIGNER.stream_token(ID, "read", time.time() - 1).partition(".")

    later = f"{int(expiry, 16) + 3600:x}"

    assert not SIGNER.is_stream_token(ID, "read", f"{later}.{signature}")


@pytest.mark.parametrize("token", ["", ".", "é", "0" * 32, f"-1.{'0' * 32}", f"0x9.{'0' * 32}"])
def test_what_is_no_token_permits_nothing(token: str) -> None:
    assert not SIGNER.is_stream_token(ID, "read", token)

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

    assert SIGNER.tag_in_token(ID, "read", token) == ""
    assert SIGNER.tag_in_token(ID, "cancel", token) is None
    assert SIGNER.tag_in_token(ID[:-1] + "1", "read", token) is None
    assert Signer(b"t" * 32).tag_in_token(ID, "read", token) is None


def test_a_token_has_the_tag_of_its_api_key() -> None:
    token = SIGNER.stream_token(ID, "read", time.time() + 60, key_id="00aa")
    expiry, tag, signature = token.split(".")
    other = SIGNER.key_tag("00ab")

    assert SIGNER.tag_in_token(ID, "read", token) == tag == SIGNER.key_tag("00aa")
    assert SIGNER.tag_in_token(ID, "read", f"{expiry}.{other}.{signature}") is None
    assert SIGNER.tag_in_token(ID, "read", f"{expiry}.{signature}") is None
    assert "00aa" not in token


def test_a_token_expires() -> None:
    token = SIGNER.stream_token(ID, "read", time.time() - 1)

    assert SIGNER.tag_in_token(ID, "read", token) is None


def test_an_expiry_cannot_be_changed() -> None:
    expiry, _, signature = SIGNER.stream_token(ID, "read", time.time() - 1).partition(".")

    later = f"{int(expiry, 16) + 3600:x}"

    assert SIGNER.tag_in_token(ID, "read", f"{later}.{signature}") is None


@pytest.mark.parametrize("token", ["", ".", "é", "0" * 32, f"-1.{'0' * 32}", f"0x9.{'0' * 32}"])
def test_what_is_no_token_permits_nothing(token: str) -> None:
    assert SIGNER.tag_in_token(ID, "read", token) is None


def test_the_id_of_an_idempotent_request_cannot_be_guessed_without_the_secret() -> None:
    ids = {
        signer.request_id("chatcmpl-", tenant, key)
        for signer in (SIGNER, Signer(b"t" * 32))
        for tenant in ("acme", "other")
        for key in ("a", "b")
    }

    assert len(ids) == 8
    assert {len(bytes.fromhex(one.removeprefix("chatcmpl-"))) for one in ids} == {16}
    assert SIGNER.request_id("chatcmpl-", "acme", "a") in ids

"""The signatures of receipts, and what is signed."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from joserfc import jws
from joserfc.jwk import OctKey, OKPKey

from gateway.intake.receipts import (
    ALGORITHM,
    TYPE,
    InvalidReceipt,
    ReceiptKeys,
    canonical,
    hash_request,
    verified,
)
from shared.errors import InvalidRequest, StartupError, Unavailable
from shared.messages import (
    Provenance,
    Receipt,
    ReceiptChoice,
    ReceiptRun,
    ReceiptUsage,
    SamplingParams,
    prompt_facts,
)

RECEIPT = Receipt(
    id="chatcmpl-1",
    endpoint="chat",
    model="smollm2",
    request_sha256="5f" * 32,
    sampling=SamplingParams(max_tokens=8, temperature=0.7, logit_bias={17: 2.5, 5: -1.0}),
    seed=str((1 << 64) - 1),
    num_choices=1,
    choices=(
        ReceiptChoice(
            token_ids=(5, 17, 49_151), finish_reason="stop", stop_reason="end", text_sha256="a" * 64
        ),
    ),
    usage=ReceiptUsage(prompt_tokens=3, cached_tokens=0, completion_tokens=3),
    executions=(
        ReceiptRun(
            worker="worker.1",
            attempt=1,
            numerics="cpu fused bfloat16",
            num_tokens_before=(0,),
            provenance=Provenance(
                fingerprint="c0ffee",
                tokenizer="b" * 64,
                weight_format="auto",
                dtype="bfloat16",
                version="0.1.0",
                started_at=1764.25,
                prompts=(prompt_facts([1, 2, 3], 8),),
            ),
        ),
    ),
    created_at=1764.0,
    issued_at=1765.5,
    gateway_version="0.1.0",
)


def new_key() -> OKPKey:
    return OKPKey.generate_key("Ed25519")


def pem(key: OKPKey, *, private: bool = True) -> str:
    return key.as_pem(private=private).decode()


def written(path: Path, *blocks: str) -> Path:
    path.write_text("\n".join(blocks))
    return path


@pytest.fixture(scope="module")
def key() -> OKPKey:
    return new_key()


@pytest.fixture(scope="module")
def keys(key: OKPKey) -> ReceiptKeys:
    return ReceiptKeys([key])


@pytest.fixture(scope="module")
def signed(keys: ReceiptKeys) -> str:
    return keys.sign(RECEIPT)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values that are neither objects nor lists."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in items:
            yield from leaves(part, (*path, name))
    else:
        yield path


def changes(value: Any) -> Iterator[Any]:
    match value:
        case str():
            yield from (value + "0", value[:-1], value.swapcase() + "x")
        case int() | float():
            yield from (value + 1, value - 1, -value - 3)
        case None:
            yield "something"


def changed(payload: bytes) -> Iterator[bytes]:
    """Payloads with another value, a field less or a field more."""
    for path in leaves(json.loads(payload)):
        names, last = path[:-1], path[-1]
        value = json.loads(payload)
        place = value
        for name in names:
            place = place[name]
        original = place[last]
        for other in changes(original):
            place[last] = other
            yield json.dumps(value).encode()
        del place[last]
        yield json.dumps(value).encode()
    yield json.dumps({**json.loads(payload), "extra": 1}).encode()


def encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def test_a_receipt_says_what_was_signed(keys: ReceiptKeys, signed: str) -> None:
    assert verified(signed, keys.published()) == RECEIPT


def test_a_receipt_is_canonical_json_that_any_library_reads(key: OKPKey, signed: str) -> None:
    payload = jws.deserialize_compact(signed, key, algorithms=[ALGORITHM]).payload

    assert payload == canonical(RECEIPT)
    assert payload.startswith(b'{"choices":[{"finish_reason":"stop","stop_reason":"end",')
    assert json.loads(payload)["seed"] == "18446744073709551615"


def test_every_changed_receipt_is_found_out(keys: ReceiptKeys, signed: str) -> None:
    head, _, signature = signed.split(".")
    payloads = set(changed(canonical(RECEIPT)))
    assert len(payloads) > 100

    for payload in payloads:
        with pytest.raises(InvalidReceipt, match="signature"):
            verified(f"{head}.{encoded(payload)}.{signature}", keys.published())


def test_every_changed_signature_is_found_out(keys: ReceiptKeys, signed: str) -> None:
    head, payload, signature = signed.split(".")
    bits = base64.urlsafe_b64decode(signature + "==")
    others = [
        *(bits[:k] + bytes([bits[k] ^ 1 << k % 8]) + bits[k + 1 :] for k in range(len(bits))),
        bits[:-1],
        bits + b"\0",
        b"",
    ]

    for other in others:
        with pytest.raises(InvalidReceipt):
            verified(f"{head}.{payload}.{encoded(other)}", keys.published())


@pytest.mark.parametrize(
    "text", ["", "receipt", "a.b", "a.b.c", "..", "{}", "\0", "é.é.é", "a.b.c.d"]
)
def test_what_is_no_receipt_is_refused(keys: ReceiptKeys, text: str) -> None:
    with pytest.raises(InvalidReceipt):
        verified(text, keys.published())


def test_no_other_algorithm_is_accepted(key: OKPKey, keys: ReceiptKeys, signed: str) -> None:
    _, payload, signature = signed.split(".")
    none = encoded(b'{"alg":"none","typ":"warren-receipt"}')
    public = OctKey.import_key(base64.urlsafe_b64decode(f"{key.as_dict(private=False)['x']}="))
    mac = jws.serialize_compact({"alg": "HS256", "typ": TYPE}, canonical(RECEIPT), public)

    for text in (f"{none}.{payload}.", f"{none}.{payload}.{signature}", mac):
        with pytest.raises(InvalidReceipt):
            verified(text, keys.published())


def test_a_key_of_the_receipt_itself_is_not_trusted(keys: ReceiptKeys) -> None:
    stranger = new_key()
    header = {"alg": ALGORITHM, "typ": TYPE, "jwk": stranger.as_dict(private=False)}
    forged = jws.serialize_compact(header, canonical(RECEIPT), stranger, algorithms=[ALGORITHM])

    for text in (forged, ReceiptKeys([stranger]).sign(RECEIPT)):
        with pytest.raises(InvalidReceipt):
            verified(text, keys.published())


def test_another_document_with_a_good_signature_is_no_receipt(
    key: OKPKey, keys: ReceiptKeys
) -> None:
    def signed(payload: bytes, kind: str = TYPE) -> str:
        header = {"alg": ALGORITHM, "kid": key.thumbprint(), "typ": kind}
        return jws.serialize_compact(header, payload, key, algorithms=[ALGORITHM])

    loose = json.dumps(json.loads(canonical(RECEIPT)), indent=1).encode()
    for text in (signed(b"{}"), signed(canonical(RECEIPT), "JWT"), signed(loose)):
        with pytest.raises(InvalidReceipt, match=r"receipt|fields"):
            verified(text, keys.published())


def test_the_first_key_signs_and_the_keys_after_it_are_published(tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    before = ReceiptKeys([old]).sign(RECEIPT)
    file = written(tmp_path / "keys", "# new", pem(new), "# old", pem(old, private=False))

    keys = ReceiptKeys.of(file)

    published = keys.published()
    assert [one["kid"] for one in published["keys"]] == [new.thumbprint(), old.thumbprint()]
    assert not any("d" in one for one in published["keys"])
    assert jws.deserialize_compact(keys.sign(RECEIPT), new, algorithms=[ALGORITHM]).headers() == {
        "alg": ALGORITHM,
        "kid": new.thumbprint(),
        "typ": TYPE,
    }
    assert verified(before, published) == RECEIPT


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        pytest.param([""], "contains no key", id="none"),
        pytest.param([pem(new_key(), private=False)], "is public", id="public"),
        pytest.param(
            ["-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----"],
            "cannot be read",
            id="broken",
        ),
        pytest.param([pem(OKPKey.generate_key("X25519"))], "not an Ed25519 key", id="other"),
    ],
)
def test_a_file_without_a_usable_key_stops_the_gateway(
    tmp_path: Path, blocks: list[str], reason: str
) -> None:
    with pytest.raises(StartupError, match=reason):
        ReceiptKeys.of(written(tmp_path / "keys", *blocks))


def test_without_keys_nothing_is_promised_and_nothing_signed() -> None:
    keys = ReceiptKeys.of(None)

    assert keys.published() == {"keys": []}
    with pytest.raises(InvalidRequest, match="WARREN_RECEIPT_KEYS_FILE"):
        keys.require()
    with pytest.raises(Unavailable):
        keys.sign(RECEIPT)


@pytest.mark.parametrize(
    "other",
    [
        b'{"b":[1,2.0],"a":"\\u00e9","seed":4611686018427387905}',
        b'{ "seed": 4611686018427387905, "a": "\xc3\xa9",\n "b": [1.0, 2] }',
    ],
)
def test_the_hash_of_a_request_depends_on_its_values_alone(other: bytes) -> None:
    request = '{"a":"é","b":[1,2],"seed":4611686018427387905}'.encode()

    assert hash_request(other) == hash_request(request)
    assert hash_request(b'{"a":"e"}') != hash_request(request)


@pytest.mark.parametrize("body", [b'{"a":1e999}', b'{"a":' + b"9" * 400 + b"}", b"{", b'"\\ud800"'])
def test_a_request_without_canonical_json_has_no_receipt(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="canonical JSON"):
        hash_request(body)

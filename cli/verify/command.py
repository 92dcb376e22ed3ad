"""The command ``warren verify``: check a receipt, and compute its answer again."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer

from cli.gateway_client import answer_of
from cli.options import GatewayAccess, takes_gateway
from cli.runtime import needs
from cli.terminal import number_of, output
from shared.errors import StartupError
from shared.printable import printable

if TYPE_CHECKING:
    from cli.verify.recomputation import Recomputed
    from shared.messages import Receipt

_KEYS_PATH = "/.well-known/jwks.json"


@takes_gateway
def verify(
    receipt: Annotated[
        Path,
        typer.Argument(help="File with a receipt, with an answer, or with a line of a batch."),
    ],
    gateway: GatewayAccess,
    request: Annotated[
        Path | None, typer.Option(help="File with the body of the request, as JSON.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to compute the answer with again: a directory or a known name. It needs "
            "--request, because a receipt has only hashes of prompts."
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="File with the public keys, a copy of /.well-known/jwks.json. Without it, the "
            "gateway at --url is asked."
        ),
    ] = None,
) -> None:
    """Check the signature of a receipt, whether it belongs to a request, and whether a model gives
    its answer. No broker is needed. The exit status is 1 if anything does not hold.

    warren verify answer.json --request request.json --model smollm2
    """
    if model is not None and request is None:
        raise StartupError("--model needs --request: a receipt has only hashes of prompts")
    with needs("gateway"):
        from gateway.intake.receipts import InvalidReceipt, hash_request, verified

    published = _json(keys) if keys is not None else answer_of(gateway, "GET", _KEYS_PATH)
    try:
        stated = verified(_receipt_in(receipt), published)
    except InvalidReceipt as error:
        _fail("signature", str(error))
    _say("signature", f"holds; the receipt is that of {stated.id}")
    body = b"" if request is None else _bytes(request)
    if request is not None:
        if hash_request(body) != stated.request_sha256:
            _fail("request", f"{request} is not the request of this receipt")
        _say("request", "is that of the receipt")
    if model is not None:
        _recompute(stated, body, model)


def _recompute(stated: "Receipt", body: bytes, model: str) -> None:
    with needs("worker"):
        from cli.verify.recomputation import Recomputation, load

    loaded = load(model, stated)
    try:
        recomputation = Recomputation(stated, body, loaded)
        if problem := recomputation.problem():
            _fail("model", problem)
        began = time.monotonic()
        result = asyncio.run(recomputation.compare())
        _report(result, time.monotonic() - began)
    finally:
        loaded.engine.stop()


def _report(result: "Recomputed", duration_s: float) -> None:
    count = f"{number_of(result.num_tokens, 'token')} in {duration_s:.2f} s"
    if result.problem:
        _fail("answer", result.problem)
    match result.standard:
        case "exact" if result.differences:
            found = result.differences[0]
            _fail("answer", f"{found}. This is proof of another model, format or text")
        case "exact":
            _say("answer", f"is the one that this model gives: {count}")
            return
        case "margins":
            num_equal = result.num_tokens - len(result.differences)
            _say("answer", f"{num_equal} of {count} are the ones that this model draws")
        case "likelihood":
            _say("answer", f"is judged without its random numbers, which the engine drew: {count}")
    for line in (*result.differences, *result.evidence):
        _say("", line)
    _say("", f"This is evidence and no proof: {result.why_not_exact}")


def _receipt_in(path: Path) -> str:
    """The compact JWS in a file: alone, in an answer, or in a line of a batch's output."""
    text = _bytes(path).decode(errors="replace").strip()
    if not text.startswith("{"):
        return text
    value = _json(path)
    for name in ("response", "body"):  # a line of a batch
        value = value.get(name, value)
    found = value.get("receipt")
    if not isinstance(found, str):
        raise StartupError(f'{path} has no "receipt"')
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(_bytes(path), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise StartupError(f"{path} is not a JSON object: {error}") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None


def _say(what: str, finding: str) -> None:
    output.print(printable(f"{what:<10} {finding}"), markup=False, soft_wrap=True)


def _fail(what: str, finding: str) -> NoReturn:
    _say(what, f"does NOT hold: {finding}")
    raise typer.Exit(1)

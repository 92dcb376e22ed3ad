"""What a gateway must know of a request to read its log; sent with the job and returned in
`Started`."""

import msgspec
from msgspec import Struct


class LogFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts of one request that outlive its gateway."""

    tenant: str = ""
    body_hash: str = ""
    """Of a request with an Idempotency-Key; otherwise empty."""
    num_choices: int = 1
    """All choices of all prompts."""
    is_detached: bool = False
    """The request continues without a client."""
    rendering: bytes = b""
    """How to render the log; of no meaning here."""

    def encode(self) -> bytes:
        """Encode for `GenerationJob.context`."""
        return _ENCODER.encode(self)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(LogFacts)


def decode_facts(context: bytes) -> LogFacts:
    """Raises `msgspec.MsgspecError` if another program wrote these bytes."""
    return _DECODER.decode(context)

"""The payloads that streams of several endpoints have in common."""

import msgspec

from gateway.errors import error_body
from gateway.log.framing import Payload
from shared import errors
from shared.errors import WarrenError
from shared.messages import Failed

ENCODER = msgspec.json.Encoder()


DONE = Payload(b"[DONE]", has_place=False)


def error_payload(error: WarrenError) -> Payload:
    """The last payload of a failed stream, as clients of chat and completions know it."""
    return Payload(ENCODER.encode(error_body(error)))


def error_of(event: Failed) -> WarrenError:
    return errors.from_code(event.code, event.message, event.param)

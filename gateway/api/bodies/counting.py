"""The bodies and answers of the endpoints that count the tokens of a prompt. A body is the same as
for a generation, so that a client can count the tokens of a request before it sends the request;
parameters that do not change the prompt have no effect."""

from typing import Literal

from msgspec import Struct

from gateway.api.bodies.conversations import OfferedTools
from gateway.api.bodies.messages import MessagesRequest
from gateway.api.bodies.quick import QuickDraft
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.bodies.schemas import NumTokens
from gateway.api.bodies.tool_choice import ChatToolChoice, callable_tools
from gateway.fleet.quick import QuickLane
from shared.messages import Announcement, QuickJob, Tokenized, TokenizeJob


class MessageTokens(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input_tokens: int


class ResponseTokens(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class MessageTokensRequest(MessagesRequest, frozen=True, kw_only=True):
    """The body of ``POST /v1/messages/count_tokens``."""

    max_tokens: NumTokens = 0

    def job(self, draft: QuickDraft) -> TokenizeJob:
        """Raises `InvalidRequest`."""
        return _job(self, self.offered(), self.choice(), draft)

    def check(self, served: Announcement | None) -> None:
        """There are no token ids to check."""

    async def answer(self, lane: QuickLane, job: QuickJob) -> MessageTokens:
        return MessageTokens(input_tokens=await _count(lane, job))


class ResponseTokensRequest(ResponsesRequest, frozen=True, kw_only=True):
    """The body of ``POST /v1/responses/input_tokens``."""

    def job(self, draft: QuickDraft) -> TokenizeJob:
        """Raises `InvalidRequest`."""
        return _job(self, self.offered(), self.choice(), draft)

    def check(self, served: Announcement | None) -> None:
        """There are no token ids to check."""

    async def answer(self, lane: QuickLane, job: QuickJob) -> ResponseTokens:
        return ResponseTokens(input_tokens=await _count(lane, job))


def _job(
    body: MessagesRequest | ResponsesRequest,
    offered: OfferedTools,
    choice: ChatToolChoice | None,
    draft: QuickDraft,
) -> TokenizeJob:
    tools = offered.functions if callable_tools(choice, offered) else ()
    (prompt,) = body.prompts(tools)
    return TokenizeJob(**draft.fields(), prompt=prompt)


async def _count(lane: QuickLane, job: QuickJob) -> int:
    return len((await lane.ask(job, Tokenized)).token_ids)

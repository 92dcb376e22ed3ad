"""Clients that offer a newer protocol than HTTP/1.1, or speak an older protocol."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.http import LiveGateway, chat_body, events, text_of

OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    "websocket": (
        b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    ),
}
COUNTED = json.dumps({"model": "scripted", "prompt": "one two three"}).encode()
ANSWER = b'"count":3'
STREAMS = {
    "/v1/chat/completions": chat_body(stream=True),
    "/v1/completions": {"model": "scripted", "prompt": "one two three", "stream": True},
    "/v1/messages": chat_body(stream=True, max_tokens=8),
    "/v1/responses": {"model": "scripted", "input": "one two three", "stream": True},
}
JAVA = """
import java.net.URI;
import java.net.http.*;
import java.net.http.HttpRequest.*;

public class Client {
    public static void main(String[] arguments) throws Exception {
        var client = HttpClient.newHttpClient();
        var body = arguments[1].getBytes("UTF-8");
        for (var publisher : new BodyPublisher[] {
                BodyPublishers.ofByteArray(body),
                BodyPublishers.ofInputStream(() -> new java.io.ByteArrayInputStream(body)),
                BodyPublishers.ofByteArray(body)}) {
            var request = HttpRequest.newBuilder(URI.create(arguments[0]))
                .header("Content-Type", "application/json").POST(publisher).build();
            var answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.body());
        }
    }
}
"""
"""What LangChain4j and Spring AI do: a client with the defaults of the JDK, which offers HTTP/2."""


def head(method: bytes, path: bytes, *headers: bytes) -> bytes:
    lines = [b"%b %b HTTP/1.1\r\nHost: warren\r\n" % (method, path), *headers, b"\r\n"]
    return b"".join(lines)


def post(offer: str, body: bytes = COUNTED, *, is_chunked: bool = False) -> bytes:
    framing = b"Transfer-Encoding: chunked\r\n"
    if not is_chunked:
        framing = b"Content-Length: %d\r\n" % len(body)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    return (
        head(b"POST", b"/tokenize", b"Content-Type: application/json\r\n", framing, OFFERS[offer])
        + sent
    )


async def answers(gateway: LiveGateway, pieces: Sequence[bytes], num_answers: int) -> list[bytes]:
    """Send ``pieces`` in packets of their own; returns so many answers, which have a length."""
    url = httpx.URL(gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    found: list[bytes] = []
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        # The gateway has read a piece once another client, which came later, is answered.
        await gateway.http.get("/live")
    for _ in range(num_answers):
        top = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in top.lower().split(b"\r\n") if b"content-length" in line)
        found.append(top + await reader.readexactly(int(length.partition(b":")[2])))
    writer.close()
    await writer.wait_closed()
    return found


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("split", [None, 20, 1], ids=["at once", "split body", "split end"])
async def test_the_body_after_an_offer_of_another_protocol_is_read(
    gateway: LiveGateway, offer: str, split: int | None, *, is_chunked: bool
) -> None:
    request = post(offer, is_chunked=is_chunked)
    pieces = [request] if split is None else [request[:-split], request[-split:]]

    [answer] = await answers(gateway, pieces, 1)

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert ANSWER in answer


async def test_a_head_that_offers_another_protocol_arrives_byte_by_byte(
    gateway: LiveGateway,
) -> None:
    request = post("h2c")

    [answer] = await answers(gateway, [request[k : k + 1] for k in range(len(request))], 1)

    assert ANSWER in answer


async def test_each_request_of_a_connection_may_offer_another_protocol(
    gateway: LiveGateway,
) -> None:
    live = head(b"GET", b"/live", OFFERS["h2c"])
    requests = [live, post("h2c"), post("h2c", is_chunked=True), live, post("websocket")]

    pipelined = await answers(gateway, [b"".join(requests)], 5)
    one_by_one = await answers(gateway, requests, 5)

    for found in (pipelined, one_by_one):
        assert [answer.split()[1] for answer in found] == [b"200"] * 5
        assert [ANSWER in answer for answer in found] == [False, True, True, False, True]


async def test_a_large_body_follows_an_offer(gateway: LiveGateway) -> None:
    body = json.dumps({"model": "scripted", "prompt": "word " * 50_000}).encode()

    [answer] = await answers(gateway, [post("h2c", body)], 1)

    assert b'"count":50000' in answer


async def test_a_tunnel_is_refused(gateway: LiveGateway) -> None:
    [answer] = await answers(gateway, [b"CONNECT example.org:443 HTTP/1.1\r\n\r\n"], 1)

    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")
async def test_javas_client_is_answered(gateway: LiveGateway, tmp_path: Path) -> None:
    source = tmp_path / "Client.java"
    source.write_text(JAVA)

    output = await run(
        "java", "-XX:TieredStopAtLevel=1", str(source), f"{gateway.url}/tokenize", COUNTED.decode()
    )

    lines = output.splitlines()
    assert [line.split()[0] for line in lines] == ["200"] * 3
    assert all(ANSWER.decode() in line for line in lines)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("offer", ["--http2", "--http1.0", "--http1.1"])
@pytest.mark.parametrize("path", STREAMS)
async def test_curl_reads_a_stream(gateway: LiveGateway, path: str, offer: str) -> None:
    body = json.dumps(STREAMS[path])

    shown = await run(
        "curl", "--silent", "--show-error", "--raw", "--include", offer, f"{gateway.url}{path}",
        "--header", "Content-Type: application/json", "--data", body,
    )  # fmt: skip

    top, _, sent = shown.replace("\r\n", "\n").partition("\n\n")
    assert top.startswith("HTTP/1.1 200")
    assert ("transfer-encoding: chunked" in top) == (offer != "--http1.0")
    assert events(sent)
    if path == "/v1/chat/completions":
        assert text_of(sent).split() == ["one", "two", "three"]


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_to_an_older_client_ends_with_its_connection(
    gateway: LiveGateway, path: str
) -> None:
    body = json.dumps(STREAMS[path]).encode()
    url = httpx.URL(gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST %b HTTP/1.0\r\nHost: warren\r\nConnection: keep-alive\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (path.encode(), len(body), body)
    )

    top, _, sent = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()

    fields = top.lower().split(b"\r\n")
    assert b"connection: close" in fields
    assert not any(field.startswith((b"transfer-encoding", b"content-length")) for field in fields)
    assert sent.startswith((b"data: ", b"event: "))
    assert sent.endswith(b"\n\n")


async def test_a_whole_answer_to_an_older_client_has_its_length(gateway: LiveGateway) -> None:
    [answer] = await answers(gateway, [b"GET /live HTTP/1.0\r\n\r\n"], 1)

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer.lower()


async def run(*command: str) -> str:
    """The output of a command that succeeds."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()

"""Frames of a broker, however its bytes arrive."""

import asyncio
import random
import struct
from collections.abc import Iterable

import pytest
from aiormq.abc import ChannelFrame
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel, Queue
from pamqp.frame import FrameTypes
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from shared.bus.rabbit import frames
from shared.bus.rabbit.frames import FrameStream, MessageFrames, Outbox, delivery_of

OTHER_CHANNEL = 2


class Received(MessageFrames):
    """The bodies of the deliveries on a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[int] = []
        self.bodies: list[bytes] = []

    def take_method(self, method: int, payload: bytes) -> bool:
        if method != Basic.Deliver.index:
            return False
        self.tags.append(delivery_of(payload)[0])
        return True

    def take_message(self, header: bytes, body: bytes) -> None:
        self.bodies.append(body)


def raw(*parts: FrameTypes, channel: int = 1) -> bytes:
    return b"".join(frame.marshal(part, channel) for part in parts)


def delivery(tag: int, *pieces: bytes, channel: int = 1) -> bytes:
    header = ContentHeader(body_size=sum(map(len, pieces)))
    bodies = map(ContentBody, pieces)
    return raw(Basic.Deliver("tag", tag, False, "", ""), header, *bodies, channel=channel)


async def read(chunks: Iterable[bytes]) -> tuple[Received, bytes]:
    """Feed a connection; returns what channel 1 took, and what was passed on."""
    received, stream = Received(), FrameStream()
    stream.listen(1, received)
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    return received, await stream.read()


CONSUMED, OF_ANOTHER = raw(Basic.ConsumeOk("tag")), delivery(1, b"other", channel=OTHER_CHANNEL)
BEAT, CLOSED = raw(Heartbeat(), channel=0), raw(Channel.Close(404, "gone", 0, 0))
HALF_A_MESSAGE = delivery(4, b"never", b"complete")[: -len(raw(ContentBody(b"complete")))]
CONVERSATION = [
    CONSUMED,
    delivery(1, b"one"),
    OF_ANOTHER,
    delivery(2, b"in ", b"three ", b"pieces"),
    BEAT,
    delivery(3),
    HALF_A_MESSAGE,
    CLOSED,
    delivery(1, b"of the next channel with the number"),
]


def is_taken_as_it_should_be(received: Received, passed: bytes) -> bool:
    return (received.is_over, received.tags, received.bodies, passed) == (
        True,
        [1, 2, 3, 4],
        [b"one", b"in three pieces", b""],
        b"".join((CONSUMED, OF_ANOTHER, BEAT, CLOSED, CONVERSATION[-1])),
    )


async def test_frames_may_be_cut_anywhere() -> None:
    data = b"".join(CONVERSATION)

    for cut in range(len(data) + 1):
        assert is_taken_as_it_should_be(*await read((data[:cut], data[cut:])))
    assert is_taken_as_it_should_be(*await read(data[at : at + 1] for at in range(len(data))))


@pytest.mark.parametrize(
    "fault",
    [
        raw(Basic.GetEmpty()),
        raw(Basic.GetOk(1, False, "", "", 0)),
        raw(Basic.Deliver("tag", 1, False, "", ""), ContentBody(b"without a header")),
        delivery(1, b"one")[: -len(raw(ContentBody(b"one")))] + raw(ContentHeader()),
        struct.pack(">BHI", 1, 1, 5) + struct.pack(">IB", Basic.Deliver.index, 9) + b"\xce",
    ],
    ids=["empty answer", "answer", "body without header", "two headers", "short method"],
)
async def test_a_frame_that_makes_no_sense_ends_the_connection(fault: bytes) -> None:
    received, stream = Received(), FrameStream()
    stream.listen(1, received)

    stream.feed_data(delivery(1, b"before") + fault + delivery(2, b"lost"))
    stream.feed_data(delivery(3, b"lost as well"))

    assert isinstance(stream.exception(), ConnectionError)
    assert received.bodies == [b"before"]


@pytest.mark.parametrize(
    "fault",
    [BEAT[:-1] + b"\0", b"\x09" + BEAT[1:], b"AMQP\0\0\x09\x01", delivery(2, b"x")[:-1] + b"\0"],
    ids=["wrong end", "unknown kind", "another version", "wrong end of a message"],
)
async def test_aiormq_gets_whatever_cannot_be_divided_into_frames(fault: bytes) -> None:
    received, passed = await read((delivery(1, b"before"), BEAT + fault, delivery(3, b"after")))

    assert received.bodies == [b"before"]
    assert passed.startswith(BEAT)
    assert (fault + delivery(3, b"after")).endswith(passed.removeprefix(BEAT))
    assert passed.endswith(delivery(3, b"after"))


async def test_messages_keep_a_connection_alive_and_pieces_of_frames_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "_BEAT_INTERVAL_S", -1.0)
    data = delivery(1, b"one")
    end = len(raw(ContentBody(b"one"))) // 2

    _, passed = await read((data, data[:3], data[3:-end], data[-end:]))

    assert passed == BEAT * 3


async def test_aiormq_knows_how_long_a_broker_that_sent_messages_has_been_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance, stream = random.Random(5), FrameStream()
    clock, heard_at = [asyncio.get_running_loop().time()], [asyncio.get_running_loop().time()]
    stream.listen(1, Received())
    monkeypatch.setattr(stream, "_loop_time", lambda: clock[0])

    async def hear() -> None:
        while await stream.readexactly(len(BEAT)):
            heard_at.append(clock[0])

    async with asyncio.TaskGroup() as group:
        hearing = group.create_task(hear())
        for _ in range(1000):
            clock[0] += chance.random() ** 4
            stream.feed_data(delivery(1, b"one"))
            await asyncio.sleep(0)
            assert clock[0] - heard_at[-1] <= 0.1
        hearing.cancel()


async def test_the_end_of_a_connection_ends_each_of_its_channels() -> None:
    stream, channels = FrameStream(), [Received(), Received()]
    for number, received in enumerate(channels, start=1):
        stream.listen(number, received)

    stream.end()

    assert [received.is_over for received in channels] == [True, True]


async def test_a_stream_of_no_messages_is_not_changed() -> None:
    answers = raw(Queue.PurgeOk(1), Basic.QosOk(), Basic.Cancel("tag"))

    received, passed = await read((answers,))

    assert (received.bodies, passed) == ([], answers)


async def test_what_is_sent_in_one_turn_leaves_in_one_write() -> None:
    queue: asyncio.Queue[ChannelFrame] = asyncio.Queue()
    outbox = Outbox(queue)

    outbox.send(b"a")
    outbox.send(b"b")
    await asyncio.sleep(0)
    outbox.send(b"c")
    await asyncio.sleep(0)

    assert [queue.get_nowait().payload for _ in range(queue.qsize())] == [b"ab", b"c"]

"""Stream an answer over AMQP, and keep reading when its worker dies.

Usage: python amqp_stream.py BROKER_URL QUESTION [MODEL]. Needs pika and msgspec.
"""

import sys
import uuid
from typing import Any

import msgspec
from pika import BasicProperties, BlockingConnection, URLParameters

MAX_EXCUSED = 6
"""Lost runs that are not counted as crashes, because they generated tokens."""
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class LogReader:
    """Reads the log of one choice: decides which events count, and answers workers."""

    def __init__(self, channel: Any, request_id: str, user: str) -> None:
        self.channel = channel
        self.properties = BasicProperties(user_id=user)
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.prefix_hash = 0xCBF29CE484222325  # FNV-1a over whole token ids, 64 bits
        self.numerics = ""  # of the worker that generated the last token
        self.attempt = 0
        self.run: dict[str, Any] | None = None  # the `Started` of the current attempt
        self.replaced: set[str] = set()
        self.handed_over: set[str] = set()
        self.productive: set[str] = set()  # runs that generated tokens

    def read(self, event: dict[str, Any]) -> bool:
        """Print what counts. Returns whether the log has ended."""
        match event["type"]:
            case "started":
                self.start(event)
            case "handed_over":
                self.handed_over.add(event["ticket"])
            case "failed" if self.is_failure(event):
                raise SystemExit(f"{event['code']}: {event['message']}")
            case "token_delta" | "finished" if self.run and self.is_next(event):
                self.numerics = self.run["numerics"]
                self.productive.add(self.run["ticket"])
                for token_id in event["token_ids"]:
                    self.token_ids.append(token_id)
                    self.prefix_hash = (self.prefix_hash ^ token_id) * 0x100000001B3 % (1 << 64)
                print(event["text"], end="", flush=True)
                return bool(event["type"] == "finished")
        return False

    def start(self, started: dict[str, Any]) -> None:
        if self.run is None or started["ticket"] != self.run["ticket"]:
            newest = (-1, False, 0) if self.run is None else delivery(self.run)
            if delivery(started) <= newest:  # from a worker that no longer has the job
                self.cancel(started, is_replaced=delivery(started) == newest)
                return
            if self.run is not None:
                self.cancel(self.run, is_replaced=True)
                self.replaced.add(self.run["ticket"])
            self.attempt = max(self.attempt, int(started["is_waiting"])) + 1
            self.run = started
        if self.attempt > 1:
            lost = self.replaced - self.handed_over
            self.command(
                started,
                type="continue",
                attempt=self.attempt,
                numerics=self.numerics,
                choices=[{"token_ids": self.token_ids, "is_finished": False}],
                num_crashes=len(lost) - min(len(lost & self.productive), MAX_EXCUSED),
            )

    def is_next(self, event: dict[str, Any]) -> bool:
        """Whether an event continues exactly the tokens that were read."""
        place = (self.attempt, len(self.token_ids), self.prefix_hash)
        return place == (event["attempt"], event["index"], event["prefix_hash"])

    def is_failure(self, failed: dict[str, Any]) -> bool:
        if failed["ticket"] is not None:
            return self.run is not None and failed["ticket"] == self.run["ticket"]
        return (failed["attempt"] == 0 and not self.token_ids) or self.is_next(failed)

    def cancel(self, started: dict[str, Any], *, is_replaced: bool) -> None:
        self.command(started, type="cancel", is_replaced=is_replaced)

    def command(self, started: dict[str, Any], **command: Any) -> None:
        """Send a command to the worker that wrote ``started``."""
        body = {"request_id": self.request_id, "ticket": started["ticket"], **command}
        self.channel.basic_publish(
            "warren.control", started["worker"], encode(body), self.properties
        )


def delivery(started: dict[str, Any]) -> tuple[int, bool, int]:
    """Orders the deliveries of a job: a later one is greater."""
    return started["publication"], started["is_alone"], started["num_returns"]


def main(url: str, question: str, model: str = "smollm2") -> None:
    parameters = URLParameters(url)
    user = parameters.credentials.username
    request_id = f"{user}.example-{uuid.uuid4().hex}"  # names of other users are refused
    queue = f"reply.{request_id}"
    job = {
        "type": "generation_job",
        "request_id": request_id,
        "model": model,
        "mode": "stream",
        "prompts": [{"type": "chat", "messages": [{"role": "user", "content": question}]}],
        "sampling": {"max_tokens": 64, "temperature": 0.7, "seed": 17},
    }
    properties = BasicProperties(
        "application/msgpack",
        delivery_mode=2,
        correlation_id=request_id,
        reply_to=queue,
        user_id=user,
    )
    connection = BlockingConnection(parameters)
    events, jobs = connection.channel(), connection.channel()
    reader = LogReader(events, request_id, user)

    def on_event(channel: Any, method: Any, _: BasicProperties, body: bytes) -> None:
        if reader.read(decode(body)):
            channel.stop_consuming()

    events.queue_declare(queue, durable=True, arguments={"x-expires": 600_000})
    events.queue_bind(queue, exchange="warren.replies", routing_key=queue)
    # Exclusive and never acknowledged: the queue keeps the whole log for the next reader.
    events.basic_consume(queue, on_event, exclusive=True)
    jobs.confirm_delivery()  # a model that was never served, or a full queue, raises here
    jobs.basic_publish(
        "warren.jobs", f"{model}.interactive", encode(job), properties, mandatory=True
    )
    events.start_consuming()
    events.queue_delete(queue)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])

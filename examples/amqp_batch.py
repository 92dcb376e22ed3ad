"""Answer every line of a file over AMQP, and write one line of JSON for each.

Usage: python amqp_batch.py BROKER_URL QUESTIONS_FILE [MODEL]
"""

import json
import sys
import uuid
from itertools import islice
from pathlib import Path
from typing import Any

from pika import BasicProperties, BlockingConnection, URLParameters
from pika.exceptions import NackError, UnroutableError

WINDOW = 100  # jobs without an answer: a long file must not fill the model's queue


def main(url: str, path: str, model: str = "smollm2") -> None:
    parameters = URLParameters(url)
    user = parameters.credentials.username
    run = f"{user}.batch-{uuid.uuid4().hex}"  # names of other users are refused
    queue = f"reply.{run}"
    channel = BlockingConnection(parameters).channel()
    channel.queue_declare(queue, durable=True, arguments={"x-expires": 600_000})
    channel.queue_bind(queue, exchange="warren.replies", routing_key=queue)
    channel.confirm_delivery()

    def publish(number: int, question: str) -> None:
        job = {
            "type": "generation_job",
            "request_id": f"{run}-{number}",
            "model": model,
            "prompts": [{"type": "chat", "messages": [{"role": "user", "content": question}]}],
            "sampling": {"max_tokens": 64, "temperature": 0},
        }
        properties = BasicProperties(
            "application/json",
            delivery_mode=2,
            correlation_id=str(number),
            reply_to=queue,
            user_id=user,
        )
        try:
            channel.basic_publish(
                "warren.jobs", f"{model}.batch", json.dumps(job), properties, mandatory=True
            )
        except UnroutableError:
            sys.exit(f"the model {model} does not exist: no worker has ever served it")
        except NackError:
            sys.exit(f"too many jobs wait for {model}: try again later")

    questions = enumerate(Path(path).read_text().splitlines(), 1)
    waiting: set[str] = set()
    while True:
        for number, question in islice(questions, WINDOW - len(waiting)):
            publish(number, question)
            waiting.add(str(number))
        if not waiting:
            break
        method, properties, body = next(channel.consume(queue))
        if properties.correlation_id in waiting:  # otherwise it is the second answer to a job
            waiting.remove(properties.correlation_id)
            print(line(int(properties.correlation_id), json.loads(body)), flush=True)
        channel.basic_ack(method.delivery_tag)  # only now: it would come again after a crash
    channel.queue_delete(queue)


def line(number: int, answer: dict[str, Any]) -> str:
    if answer["type"] == "failed":
        return json.dumps({"line": number, "error": f"{answer['code']}: {answer['message']}"})
    return json.dumps({"line": number, "text": answer["choices"][0]["text"]})


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])

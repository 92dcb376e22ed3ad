"""Ask Warren over AMQP. Usage: python publish_with_pika.py BROKER_URL QUESTION"""

import json
import sys
import uuid

from pika import BasicProperties, BlockingConnection, URLParameters
from pika.exceptions import NackError, UnroutableError

if len(sys.argv) != 3:
    sys.exit(__doc__)
parameters = URLParameters(sys.argv[1])
user = parameters.credentials.username
name = f"{user}.example-{uuid.uuid4().hex}"  # names of other users are refused
job: dict[str, object] = {"type": "generation_job", "request_id": name, "model": "smollm2"}
job["prompts"] = [{"type": "chat", "messages": [{"role": "user", "content": sys.argv[2]}]}]
job["sampling"] = {"max_tokens": 64, "temperature": 0}
channel = BlockingConnection(parameters).channel()
queue = f"reply.{name}"
channel.queue_declare(queue, durable=True, arguments={"x-expires": 600_000})
channel.queue_bind(queue, exchange="warren.replies", routing_key=queue)
channel.confirm_delivery()
header = BasicProperties(
    "application/json", delivery_mode=2, correlation_id=name, reply_to=queue, user_id=user
)
try:
    channel.basic_publish("warren.jobs", "smollm2.batch", json.dumps(job), header, mandatory=True)
except UnroutableError:
    sys.exit("the model smollm2 does not exist: no worker has ever served it")
except NackError:
    sys.exit("too many jobs wait for smollm2: try again later")
_, _, body = next(channel.consume(queue, auto_ack=True))
channel.queue_delete(queue)
answer = json.loads(body)
if answer["type"] == "failed":
    sys.exit(f"{answer['code']}: {answer['message']}")
print(answer["choices"][0]["text"])

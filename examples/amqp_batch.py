"""Answer every line of a file over AMQP, and write a line of JSON for each answer.

Usage: python amqp_batch.py BROKER_URL QUESTIONS_FILE [MODEL]
"""

import json
import sys
from pathlib import Path

from warren import Client, Failed, SamplingParams, WarrenError


def main(url: str, path: str, model: str = "smollm2") -> None:
    questions = Path(path).read_text().splitlines()
    chats = [[{"role": "user", "content": question}] for question in questions]
    sampling = SamplingParams(max_tokens=64, temperature=0)
    with Client(url, model) as client:
        for number, answer in client.batch_chat(chats, sampling):
            if isinstance(answer, Failed):
                line = {"line": number + 1, "error": f"{answer.code}: {answer.message}"}
            else:
                line = {"line": number + 1, "text": answer.text}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except WarrenError as error:
        sys.exit(str(error))

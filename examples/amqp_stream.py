"""Stream an answer over AMQP, which continues at the next token when its worker dies.

Usage: python amqp_stream.py BROKER_URL QUESTION [MODEL]
"""

import sys

from warren import Client, SamplingParams, WarrenError


def main(url: str, question: str, model: str = "smollm2") -> None:
    sampling = SamplingParams(max_tokens=64, temperature=0.7, seed=17)
    with Client(url, model) as client:
        for event in client.stream_chat([{"role": "user", "content": question}], sampling):
            print(event.text, end="", flush=True)
    print()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except WarrenError as error:
        sys.exit(str(error))

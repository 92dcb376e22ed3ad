"""Stream an answer with OpenAI's client. Usage: python openai_client.py [BASE_URL [MODEL]]"""

import os
import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
model = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
client = OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=64,
    stream=True,
)
for chunk in answer:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

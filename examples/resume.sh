#!/usr/bin/env bash
# Print the events of a stream, and come back to it with Last-Event-ID whenever the connection breaks.
# Usage: resume.sh [URL [MODEL [QUESTION]]]; OPENAI_API_KEY is the API key, if the gateway needs one.
set -euo pipefail

url=${1:-http://127.0.0.1:8000}
model=${2:-smollm2}
question=${3:-What is the capital of France?}
authorization=(-H "Authorization: Bearer ${OPENAI_API_KEY:-none}")
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT

body=$(python3 - "$model" "$question" <<'PYTHON'
import json, sys
model, question = sys.argv[1:]
messages = [{"role": "user", "content": question}]
request = {"model": model, "messages": messages, "max_tokens": 256, "stream": True, "detach": True}
print(json.dumps(request))
PYTHON
)

# Every byte that curl receives is kept, so that the last complete event is known.
touch "$directory/headers"  # curl does not create it if there is no server
curl --silent --show-error --no-buffer --dump-header "$directory/headers" \
    -H 'Accept: text/event-stream' -H 'Content-Type: application/json' "${authorization[@]}" \
    --data "$body" "$url/v1/chat/completions" | tee "$directory/events" || true

# Whether the gateway refuses the request, with a status other than $1.
refused() {
    grep '^HTTP/[0-9.]* 4' "$directory/headers" | grep --quiet --invert-match " ${1:-none}"
}

if refused; then exit 1; fi
id=$(sed -n 's/^x-request-id: \(.*\)\r$/\1/p' "$directory/headers")
if [[ -z $id ]]; then
    echo "no stream has begun: is $url a gateway of Warren?" >&2
    exit 1
fi
until grep --quiet '^data: \[DONE\]$' "$directory/events"; do
    last=$(sed -n 's/^id: //p' "$directory/events" | tail -1)
    sleep 0.5
    curl --silent --no-buffer --dump-header "$directory/headers" "${authorization[@]}" \
        -H "Last-Event-ID: $last" "$url/v1/streams/$id" | tee -a "$directory/events" || true
    if refused 429; then exit 1; fi  # a full gateway may have room the next time
done

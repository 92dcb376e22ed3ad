"""Engines over HTTP behind the worker's seam: token ids in, token ids out.

`http_engine.HttpEngine` is the `TokenEngine`; `adapters` has a file for each kind of server, and
`adapter` the protocol of an adapter. `start_up` starts or finds the server and checks that it
serves the tokenizer's model; `child` runs an engine as a child process. `server` asks it questions,
and `answer` reads the stream of a sequence.
"""

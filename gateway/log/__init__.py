"""The logs of requests: declared, read, passed on and left.

`registry.Relays` opens a log; `relay.LogRelay` passes it on; `context` is what a log says of its
request.
"""

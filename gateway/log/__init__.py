"""The logs of requests: declaration, reading, relaying and clean-up.

`registry.Relays` opens a log; `relay.LogRelay` relays it; `context` holds the request's facts that
the log carries.
"""

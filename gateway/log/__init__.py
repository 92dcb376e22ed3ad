"""The logs of requests: declaration, reading, relaying and clean-up.

`registry.Relays` opens a log; `relay.LogRelay` relays it. `cursor` and `fate` decide without I/O.
`framing` gives the payloads of an encoder their ids; nothing here knows how events are rendered.
"""

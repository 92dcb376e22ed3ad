"""The logs of requests: declaration, reading, relaying and clean-up.

`registry.Relays` opens a log; `relay.LogRelay` relays it to a client. `cursor` decides without I/O.
`framing` turns an encoder's payloads into Server-Sent Events; how events are rendered is up to the
encoder.
"""

"""Gateways for tests, and what their clients do.

`http` runs a gateway, or only its limits, inside the test's event loop, `serving` in a thread, and
`lone_gateway` in a process of its own. `batches` and `webhooks` are a client's side of these APIs,
`tool_calls` has the calls of each family of models, and `rendering` renders logs without a gateway.
"""

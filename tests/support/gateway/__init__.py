"""Gateways for tests, and what their clients do.

`http` runs a gateway inside the test's event loop, `serving` in a thread, and `lone_gateway` in a
process of its own, which `attacks` attacks. `batches` and `webhooks` are a client's side of these
APIs, `limits` shares the limits of API keys between gateways, and `rendering` renders logs without
a gateway.
"""

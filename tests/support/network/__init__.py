"""Servers and proxies of tests: `tcp_proxy` breaks connections at any byte, `amqp` at any frame.

`deadly_proxy` kills clients in the middle of their requests, `attacks` checks what hostile clients
cost a gateway, and `connections` serves connections that no test leaves open.
"""

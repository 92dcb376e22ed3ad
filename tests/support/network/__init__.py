"""Proxies that break connections: `tcp_proxy` at any byte, `amqp_proxy` at any frame of AMQP.

`amqp_frames` splits streams into frames, `amqp_faults` are the faults by name, and `provocations`
decide when they strike. `attacks` checks what hostile clients cost a gateway.
"""

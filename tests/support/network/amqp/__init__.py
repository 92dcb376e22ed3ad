"""A proxy that breaks connections at any frame of AMQP.

`proxy` passes on what `frames` has split into frames, `faults` are the faults by name, and
`provocations` decide when they strike.
"""

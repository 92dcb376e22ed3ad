"""The bus: the protocol of a message broker, and its two implementations, RabbitMQ and in
memory.

`base` has the protocol, `base.Bus`, and its types; code outside depends on these only. `subscribe`
consumes a queue across reconnections, `temporary` declares a queue for as long as a block, and
`retry` waits for the broker and repeats calls. Commands choose an implementation:
`rabbit.RabbitBus`, or `memory.MemoryBus` for one process.
"""

"""The bus: the protocol of a message broker, and its two implementations, RabbitMQ and in
memory.

`base` has the protocol, `base.Bus`, and its types; code outside depends on these only. `subscribe`
consumes a queue across reconnections, and `temporary` declares a queue for as long as a block.
Commands choose an implementation: `rabbit.RabbitBus`, or `memory.MemoryBus` for one process.
"""

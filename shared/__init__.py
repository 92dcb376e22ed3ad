"""The contract between gateway and worker: messages, event logs, the bus, errors and settings.

Both sides may use all of it. `topology` names the exchanges and queues and checks what publishers
may name, `settings` loads the settings, and `errors` is the tree of errors; each room says what it
offers.
"""

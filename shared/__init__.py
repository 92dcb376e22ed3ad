"""The contract between gateway and worker: messages, a request's log, the bus, errors, settings."""

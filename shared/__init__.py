"""The contract between gateway and worker: messages, event logs, the bus, errors and settings."""

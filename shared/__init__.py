"""The contract between gateway and worker: messages, bus, stream log, errors, settings."""

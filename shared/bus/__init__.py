"""The bus: what gateway and worker may expect of a message broker, and two that provide it."""

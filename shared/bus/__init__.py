"""The bus: the protocol of a message broker, and its two implementations, RabbitMQ and in
memory."""

"""What stands around the processes: images, broker, observability, the AMQP contract."""

"""Everything around the processes: images, broker configuration, observability, AMQP contract."""

"""The bus over RabbitMQ 3.10 to 4.3, on aio-pika.

Connections are aio-pika's; channels are those of aiormq, its protocol layer: a channel of aio-pika
leaves two callbacks on its connection for good (measured with aio-pika 10.2.1 and aiormq 7.2.4),
and a gateway opens one channel for each request.
"""

from shared.bus.rabbit.bus import RabbitBus

__all__ = ["RabbitBus"]

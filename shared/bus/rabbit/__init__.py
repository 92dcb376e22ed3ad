"""The bus over RabbitMQ 3.10 to 4.3, based on aio-pika.

Connections are aio-pika's, channels are aiormq's, its protocol layer. A channel of aio-pika leaks
two callbacks on its connection (measured with aio-pika 10.2.1 and aiormq 7.2.4), and a gateway
opens a channel for each request.

Others use `RabbitBus`, and `addresses.parse_urls` to check the URLs of a broker.
"""

from shared.bus.rabbit.bus import RabbitBus

__all__ = ["RabbitBus"]

"""Delivers webhooks: events to the endpoints of tenants, as OpenAI sends them.

`dispatcher.Deliverer` tries the deliveries that are due, `sending.Sender` signs an event and sends
it, and `network` checks the addresses that it connects to. The deliveries that are due or dead are
in `gateway.store.webhooks`.
"""

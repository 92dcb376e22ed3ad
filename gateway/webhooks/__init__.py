"""Delivers webhooks: events to the endpoints of tenants, as OpenAI sends them.

`dispatcher.Deliverer` tries what is due, `sending.Sender` signs an event and sends it, and
`network` checks the addresses that it connects to. What is due or dead is in
`gateway.store.webhooks`.
"""

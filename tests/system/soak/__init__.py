"""Ordinary and rude traffic over a real RabbitMQ: no process may end, nothing may be left behind,
and no answer may be wrong.

``python -m tests.system.soak`` is the long form.
"""

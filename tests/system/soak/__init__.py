"""Ordinary and rude traffic over a real RabbitMQ: no process may end, nothing may be left, and no
answer may be wrong. ``python -m tests.system.soak`` is the long form; with ``--provoked`` channels
and connections end all the time, and messages are refused, returned or confirmed late."""

"""Real processes over a real broker, killed, stopped and cut off while every stream is compared
with its undisturbed run. ``python -m tests.system.chaos`` is the long form."""

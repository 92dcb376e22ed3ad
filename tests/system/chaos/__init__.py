"""Kills, stops and cuts off real processes, and compares every stream with its undisturbed run.

``python -m tests.system.chaos`` is the long form.
"""

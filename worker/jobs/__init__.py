"""Consumes jobs, runs them to their terminal event, and acknowledges, requeues or dead-letters
them.

`consumer` and `unary` consume jobs; `run` decides what happens to a generation job, and `execution`
does it.
"""

"""Runs the prompts of a job through the engine and turns tokens into events.

`plan` validates a job, `choices` runs it, `bridge` connects the event loop with the engine thread.
"""

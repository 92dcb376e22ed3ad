"""Runs the prompts of a job through the engine and turns tokens into events.

`choices` plans a job and decodes its tokens, `bridge` connects the event loop with the engine,
whatever runs it.
"""

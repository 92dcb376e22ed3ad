"""From a job's prompts to its events: what the engine is asked, and what becomes of its tokens.

`plan` checks a job, `choices` runs it, `bridge` connects the event loop and the engine's thread.
"""

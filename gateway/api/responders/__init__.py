"""Responses that live as long as their request: a log on its way to one client, whole or streamed.

`generation.generate` serves a new request; the routes return a `ResumedStream` for an existing one.
"""

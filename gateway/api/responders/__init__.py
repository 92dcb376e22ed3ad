"""Responses that live as long as their request: a log on its way to one client, whole or streamed.

The routes return a `GenerationResponse` or a `ResumedStream`.
"""

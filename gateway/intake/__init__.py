"""Admission of requests: API keys, their scopes and limits, the number of requests, and the size of
bodies."""

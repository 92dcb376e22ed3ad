"""Admission of requests: API keys and tenants, the number of requests, and the size of bodies."""

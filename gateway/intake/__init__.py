"""Who gets in: API keys and their tenants, the bounded number of requests, and bounded bodies."""

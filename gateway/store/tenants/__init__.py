"""The properties of tenants that operators administer.

`keys` are the API keys in the database, `limits` the limits of tenants, `sessions` the sessions of
people that have ended early, and `erasure` deletes all stored data of a tenant.
"""

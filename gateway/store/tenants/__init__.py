"""What operators administer of tenants.

`keys` are the API keys in the database, `limits` what tenants may use, and `erasure` deletes all
that is stored of a tenant.
"""

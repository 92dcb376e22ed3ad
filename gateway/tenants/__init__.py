"""Tenants as operators administer them.

`key_directory` reads and changes the API keys of the database. `erasure` ends the work of a tenant,
and deletes all that is stored of it.
"""

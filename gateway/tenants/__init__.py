"""Tenants as operators administer them.

`erasure` ends the work of a tenant, and deletes all that is stored of it.
"""

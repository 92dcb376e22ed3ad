"""Tenants as operators administer them.

`key_directory` reads and changes API keys and limits of the database. `publishers` applies the
limits to jobs over AMQP. `erasure` ends the work of a tenant, and deletes all that is stored of it.
"""

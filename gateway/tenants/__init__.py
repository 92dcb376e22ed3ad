"""Tenants as operators administer them.

`key_directory` reads and changes API keys and limits of the database. `publishers` applies the
limits to jobs over AMQP. `stopping` ends the work of a tenant or of an API key, and
`erasure` deletes all that is stored of a tenant.
"""

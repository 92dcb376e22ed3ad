"""A module for each version of the schema, which Alembic finds by itself; nothing imports them.
`gateway.store.schema` is the schema as it is now."""

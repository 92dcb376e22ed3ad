"""Alembic's migrations, which `gateway.store.database` runs when a gateway starts."""

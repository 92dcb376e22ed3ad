"""Alembic's migrations. Only `gateway.store.database` uses them: it runs them when a gateway
starts."""

"""Runs the migrations on the connection that `gateway.store.database` passes to Alembic."""

from alembic import context

from gateway.store.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    transactional_ddl=False,  # the caller's transaction has begun
)
context.run_migrations()

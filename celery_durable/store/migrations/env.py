"""Runs the migrations on the connection that it is handed, inside its transaction."""

from __future__ import annotations

from alembic import context

_schema = context.config.attributes["schema"]

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=_schema.metadata,
    version_table=_schema.version_table,
    version_table_schema=_schema.metadata.schema,
    transactional_ddl=False,  # the caller's transaction is around all of it
)
context.run_migrations()

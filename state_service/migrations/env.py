"""Alembic's environment: migrates over the connection that ``sql_migrate`` hands in."""

from __future__ import annotations

from alembic import context

from state_service.adapters.sql_tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, compare_type=False)
with context.begin_transaction():
    context.run_migrations()

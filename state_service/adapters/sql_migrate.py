"""Migrations: the schema's versions, from the first table on (Alembic).

A revision may be cut short (MySQL's DDL is not transactional); running it again goes on where it ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import AsyncEngine

from state_service.adapters.sql_engine import READ_ONLY

_FOLDER = Path(__file__).resolve().parent.parent / "migrations"


def _config(connection: Any = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_FOLDER))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def latest() -> str:
    """The revision this version of the service works with."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


async def current(engine: AsyncEngine) -> str | None:
    """The revision of the database; None for an empty one."""
    async with engine.connect() as connection:
        connection = await connection.execution_options(**{READ_ONLY: True})
        return await connection.run_sync(lambda c: MigrationContext.configure(c).get_current_revision())


async def upgrade(engine: AsyncEngine) -> None:
    """Bring the database to ``latest``; does nothing when it is there."""
    async with engine.begin() as connection:
        await connection.run_sync(lambda c: command.upgrade(_config(c), "head"))

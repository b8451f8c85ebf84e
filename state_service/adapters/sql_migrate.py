"""Migrations: the schema's versions, from the first table on (Alembic).

A revision may be cut short (MySQL's DDL is not transactional); running it again goes on where it ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine

from state_service.adapters.sql_engine import READ_ONLY
from state_service.ports import StoreUnavailable

# Alembic tells of each step, and of its plugins as soon as it is imported: no news for who runs a service.
logging.getLogger("alembic").setLevel(logging.WARNING)

from alembic import command  # noqa: E402
from alembic.config import Config  # noqa: E402
from alembic.runtime.migration import MigrationContext  # noqa: E402
from alembic.script import ScriptDirectory  # noqa: E402

_FOLDER = Path(__file__).resolve().parent.parent / "migrations"
_WAIT_SECONDS = 60  # for another process that migrates the same database


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
    """The revision of the database; None for an empty one. Raises ``StoreUnavailable``."""
    with _driver_errors():
        async with engine.connect() as connection:
            connection = await connection.execution_options(**{READ_ONLY: True})
            return await connection.run_sync(lambda c: MigrationContext.configure(c).get_current_revision())


async def upgrade(engine: AsyncEngine) -> None:
    """Bring the database to ``latest``; does nothing when it is there. Two at once wait for each other.
    Raises ``StoreUnavailable``."""
    with _driver_errors():
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade)


def _upgrade(connection: Connection) -> None:
    with _alone(connection):
        command.upgrade(_config(connection), "head")


@contextmanager
def _alone(connection: Connection) -> Iterator[None]:
    """On SQLite the transaction keeps others out; elsewhere DDL ends it, and a lock of its own is needed."""
    if connection.dialect.name == "sqlite":
        yield
        return
    name = connection.execute(text("SELECT CONCAT('turnfence-', MD5(DATABASE()))")).scalar_one()
    taken = connection.execute(text("SELECT GET_LOCK(:name, :wait)"), {"name": name, "wait": _WAIT_SECONDS})
    if taken.scalar_one() != 1:
        raise StoreUnavailable("another process has been migrating the database for too long")
    try:
        yield
    finally:
        connection.execute(text("DO RELEASE_LOCK(:name)"), {"name": name})


@contextmanager
def _driver_errors() -> Iterator[None]:
    """Driver errors never pass; what the driver says (no access, no such database) is for who migrates."""
    try:
        yield
    except DBAPIError as error:
        raise StoreUnavailable(str(error.orig)) from error
    except (PoolTimeout, OSError) as error:
        raise StoreUnavailable(type(error).__name__) from error

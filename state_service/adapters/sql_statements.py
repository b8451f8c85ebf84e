"""The one place where statements are made: every one is scoped by organisation, and reads and updates
see only rows that are not deleted. Nothing else in the service builds a SELECT, UPDATE or INSERT."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Delete,
    Insert,
    Select,
    Table,
    UniqueConstraint,
    Update,
    and_,
    delete,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.ports import Scope


def scoped(table: Table, organ_id: str, *, deleted: bool = False) -> ColumnElement[bool]:
    """The condition that no statement may lack. ``deleted``: also rows marked as deleted."""
    tenant = table.c.organ_id == organ_id
    return tenant if deleted else and_(tenant, table.c.delete_flag == 0)


def pick(
    table: Table,
    organ_id: str,
    *where: ColumnElement[bool],
    columns: Sequence[Any] = (),
    deleted: bool = False,
) -> Select[Any]:
    return select(*(columns or (table,))).where(scoped(table, organ_id, deleted=deleted), *where)


def pick_each(
    table: Table,
    scopes: Sequence[Scope],
    also: Sequence[ColumnElement[bool]] = (),
    *,
    columns: Sequence[Any],
) -> Select[Any]:
    """Rows of several conversations, each scoped as its own; ``also``: what holds for each besides."""
    each = [and_(scoped(table, scope.organ_id), in_conversation(table, scope)) for scope in scopes]
    if also:
        each = [and_(one, condition) for one, condition in zip(each, also, strict=True)]
    return select(*columns).where(or_(*each))


def change(table: Table, organ_id: str, *where: ColumnElement[bool], deleted: bool = False) -> Update:
    return update(table).where(scoped(table, organ_id, deleted=deleted), *where)


def remove(table: Table, organ_id: str, *where: ColumnElement[bool]) -> Delete:
    """For good, whether marked as deleted or not."""
    return delete(table).where(scoped(table, organ_id, deleted=True), *where)


def pick_across(
    table: Table, *where: ColumnElement[bool], columns: Sequence[Any], deleted: bool = False
) -> Select[Any]:
    """The one exception, for the sweeper alone: rows of all organisations. ``columns`` name the organisation,
    and whatever is done with a row is scoped by it again."""
    return select(table.c.organ_id, *columns).where(table.c.delete_flag == int(deleted), *where)


def in_conversation(table: Table, scope: Scope) -> ColumnElement[bool]:
    return table.c.conversation_id == scope.conversation_id


def stamped(scope: Scope, version: int, now_ms: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the common columns."""
    return {
        "organ_id": scope.organ_id,
        "conversation_id": scope.conversation_id,
        "create_time": now_ms,
        "update_time": now_ms,
        "version": version,
        "delete_flag": 0,
        **row,
    }


async def add(connection: AsyncConnection, table: Table, *rows: Mapping[str, Any]) -> None:
    """A plain INSERT: a duplicate business key raises ``IntegrityError``."""
    await connection.execute(insert(table), [dict(row) for row in rows])


async def upsert(
    connection: AsyncConnection, table: Table, rows: Iterable[Mapping[str, Any]], *, keep: Iterable[str] = ()
) -> None:
    """INSERT, or UPDATE by the business key. ``keep``: columns that an existing row does not lose."""
    values = [dict(row) for row in rows]
    if values:
        statement = _upsert(table, connection.dialect.name, tuple(values[0]), tuple(keep))
        await connection.execute(statement, values)


async def add_missing(connection: AsyncConnection, table: Table, rows: Iterable[Mapping[str, Any]]) -> None:
    """INSERT what is not there yet; append-only records, safe to repeat."""
    values = [dict(row) for row in rows]
    if values:
        await connection.execute(_add_missing(table, connection.dialect.name), values)


# One statement object for one shape: SQLAlchemy keeps its text, where a VALUES of many rows would be compiled
# anew at each call (3–4 ms). The driver sends the rows as one statement.


@functools.cache
def _upsert(table: Table, dialect: str, columns: tuple[str, ...], keep: tuple[str, ...]) -> Insert:
    kept = {"organ_id", "conversation_id", "create_time", *keep, *_business_key(table)}
    changed = [name for name in columns if name not in kept]
    if dialect == "sqlite":
        lite = sqlite.insert(table)
        return lite.on_conflict_do_update(
            index_elements=_business_key(table), set_={name: lite.excluded[name] for name in changed}
        )
    my = mysql.insert(table)
    return my.on_duplicate_key_update({name: my.inserted[name] for name in changed or ["update_time"]})


@functools.cache
def _add_missing(table: Table, dialect: str) -> Insert:
    if dialect == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing(index_elements=_business_key(table))
    return mysql.insert(table).on_duplicate_key_update({"update_time": table.c.update_time})


def _business_key(table: Table) -> list[str]:
    name = f"uk_{table.name}"
    return next(
        [column.name for column in constraint.columns]
        for constraint in table.constraints
        if isinstance(constraint, UniqueConstraint) and constraint.name == name
    )


async def rows_of(connection: AsyncConnection, statement: Select[Any]) -> list[Mapping[str, Any]]:
    return list((await connection.execute(statement)).mappings())


async def row_of(connection: AsyncConnection, statement: Select[Any]) -> Mapping[str, Any] | None:
    row: Mapping[str, Any] | None = (await connection.execute(statement)).mappings().first()
    return row

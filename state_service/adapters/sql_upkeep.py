"""SQL for deletion and the sweeper (``ports.UpkeepStore``): found across organisations, done within one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, Final

from sqlalchemy import ColumnElement, Table
from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.adapters.sql_engine import Transactions
from state_service.adapters.sql_statements import (
    change,
    in_conversation,
    pick,
    pick_across,
    remove,
    row_of,
    rows_of,
)
from state_service.adapters.sql_tables import chat_conversation, diagnosis_run, metadata, run_trace
from state_service.adapters.sql_tables import task_node_payload as payloads
from state_service.ports import Forgotten, Scope
from turnfence.axes import RunState

# Marks in ``fence_trace`` of a buried conversation: no run id looks like one.
ERASING: Final = "~erasing"
ERASED: Final = "~erased"

ERASABLE: Final = tuple(table for table in metadata.sorted_tables if table is not chat_conversation)


class SqlUpkeep:
    """``ports.UpkeepStore`` on MySQL, MariaDB and SQLite."""

    def __init__(self, transactions: Transactions) -> None:
        self._do = transactions

    async def unfinished(self, before_ms: int, limit: int) -> list[Forgotten]:
        async def work(connection: AsyncConnection) -> list[Forgotten]:
            runs = await rows_of(
                connection,
                pick_across(
                    diagnosis_run,
                    diagnosis_run.c.run_state == RunState.RUNNING.value,
                    diagnosis_run.c.started_time < before_ms,
                    columns=(diagnosis_run.c.conversation_id,),
                )
                .order_by(diagnosis_run.c.started_time)
                .limit(limit),
            )
            scopes = dict.fromkeys(_scope(row) for row in runs)
            found = [await _row(connection, scope) for scope in scopes]
            return [_forgotten(row) for row in found if row is not None and not row["delete_flag"]]

        return await self._do.read(work)

    async def aged(self, before_ms: int, limit: int) -> list[Forgotten]:
        statement = pick_across(
            chat_conversation,
            chat_conversation.c.last_message_time < before_ms,
            columns=(
                chat_conversation.c.conversation_id,
                chat_conversation.c.user_id,
                chat_conversation.c.fence_version,
            ),
        )
        ordered = statement.order_by(chat_conversation.c.last_message_time).limit(limit)
        rows = await self._do.read(lambda connection: rows_of(connection, ordered))
        return [_forgotten(row) for row in rows]

    async def half_erased(self, limit: int) -> list[tuple[Scope, int]]:
        statement = pick_across(
            chat_conversation,
            chat_conversation.c.fence_trace == ERASING,
            columns=(chat_conversation.c.conversation_id, chat_conversation.c.fence_version),
            deleted=True,
        ).limit(limit)
        rows = await self._do.read(lambda connection: rows_of(connection, statement))
        return [(_scope(row), row["fence_version"]) for row in rows]

    async def bury(self, scope: Scope, user_id: str, now_ms: int) -> int | None:
        async def work(connection: AsyncConnection) -> int | None:
            ours = in_conversation(chat_conversation, scope)
            locked = pick(chat_conversation, scope.organ_id, ours, deleted=True).with_for_update()
            row = await row_of(connection, locked)
            if row is None or row["user_id"] != user_id:
                return None
            version: int = row["fence_version"]
            if row["delete_flag"]:
                return version
            tombstone = {
                "delete_flag": 1,
                "fence_version": version + 1,
                "fence_trace": ERASING,
                "title": "",
                "active_task_id": "",
                "session_shared": "",
                "update_time": now_ms,
            }
            await connection.execute(change(chat_conversation, scope.organ_id, ours).values(**tombstone))
            return version + 1

        return await self._do.write(work)

    async def recent_runs(self, scope: Scope, since_ms: int) -> list[str]:
        statement = pick(
            diagnosis_run,
            scope.organ_id,
            in_conversation(diagnosis_run, scope),
            diagnosis_run.c.update_time >= since_ms,
            columns=(diagnosis_run.c.run_id,),
            deleted=True,
        )
        return [row["run_id"] for row in await self._do.read(lambda c: rows_of(c, statement))]

    async def erase_some(self, scope: Scope, limit: int) -> int:
        async def work(connection: AsyncConnection) -> int:
            for table in ERASABLE:
                statement = pick(
                    table,
                    scope.organ_id,
                    in_conversation(table, scope),
                    columns=(table.c.id,),
                    deleted=True,
                ).limit(limit)
                ids = [row["id"] for row in await rows_of(connection, statement)]
                if ids:
                    await connection.execute(remove(table, scope.organ_id, table.c.id.in_(ids)))
                    return len(ids)
            return 0

        return await self._do.write(work)

    async def erased(self, scope: Scope) -> None:
        statement = change(
            chat_conversation,
            scope.organ_id,
            in_conversation(chat_conversation, scope),
            chat_conversation.c.fence_trace == ERASING,
            deleted=True,
        ).values(fence_trace=ERASED)
        await self._do.write(lambda connection: connection.execute(statement))

    async def drop_payloads(self, before_ms: int, limit: int) -> int:
        return await self._drop(payloads, payloads.c.create_time < before_ms, limit)

    async def drop_traces(self, before_ms: int, limit: int) -> int:
        return await self._drop(run_trace, run_trace.c.create_time < before_ms, limit)

    async def _drop(self, table: Table, condition: ColumnElement[bool], limit: int) -> int:
        async def work(connection: AsyncConnection) -> int:
            found = pick_across(table, condition, columns=(table.c.id,)).order_by(table.c.create_time)
            rows = await rows_of(connection, found.limit(limit))
            by_organ = sorted((row["organ_id"], row["id"]) for row in rows)
            for organ_id, group in groupby(by_organ, key=lambda pair: pair[0]):
                ids = [row_id for _, row_id in group]
                await connection.execute(remove(table, organ_id, table.c.id.in_(ids)))
            return len(rows)

        return await self._do.write(work)


async def _row(connection: AsyncConnection, scope: Scope) -> Mapping[str, Any] | None:
    ours = in_conversation(chat_conversation, scope)
    return await row_of(connection, pick(chat_conversation, scope.organ_id, ours, deleted=True))


def _scope(row: Mapping[str, Any]) -> Scope:
    return Scope(row["organ_id"], row["conversation_id"])


def _forgotten(row: Mapping[str, Any]) -> Forgotten:
    return Forgotten(_scope(row), row["user_id"], row["fence_version"])

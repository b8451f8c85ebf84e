"""SQL as others read it: pages of conversations, messages, tasks and runs (``ports.HistoryStore``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, false, or_
from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.adapters import sql_calls, sql_rows, sql_runs
from state_service.adapters.sql_engine import Transactions
from state_service.adapters.sql_statements import change, in_conversation, pick, row_of, rows_of
from state_service.adapters.sql_tables import (
    chat_conversation,
    chat_message,
    diagnosis_run,
    run_trace,
    task_instance,
    tool_call_record,
)
from state_service.ports import Clock, Cursor, Page, Scope
from turnfence import records as r
from turnfence.axes import StreamState

Rows = list[Mapping[str, Any]]


class SqlHistory:
    """``ports.HistoryStore`` on MySQL, MariaDB and SQLite."""

    def __init__(self, transactions: Transactions, clock: Clock) -> None:
        self._do = transactions
        self._clock = clock

    async def conversations(
        self, organ_id: str, user_id: str, page: Page
    ) -> tuple[list[r.Conversation], Cursor]:
        rows, cursor = await self._page(
            chat_conversation,
            organ_id,
            [chat_conversation.c.user_id == user_id],
            ["last_message_time", "id"],
            page,
        )
        return [_conversation(row) for row in rows], cursor

    async def messages(self, scope: Scope, page: Page) -> tuple[list[r.DialogueMessage], Cursor]:
        rows, cursor = await self._page(
            chat_message,
            scope.organ_id,
            [in_conversation(chat_message, scope)],
            ["version", "idx", "id"],
            page,
        )
        return [sql_rows.from_row(row, r.DialogueMessage, sql_rows.MESSAGE) for row in rows], cursor

    async def tasks(self, scope: Scope, page: Page) -> tuple[list[r.TaskMetadata], Cursor]:
        rows, cursor = await self._page(
            task_instance, scope.organ_id, [in_conversation(task_instance, scope)], ["id"], page
        )
        return [sql_rows.from_row(row, r.TaskMetadata, sql_rows.TASK) for row in rows], cursor

    async def runs(
        self, organ_id: str, user_id: str, conversation_id: str, page: Page
    ) -> tuple[list[r.Run], Cursor]:
        where = [diagnosis_run.c.user_id == user_id]
        order = ["started_time", "id"]
        if conversation_id:
            where.append(diagnosis_run.c.conversation_id == conversation_id)
            order = ["version", "id"]

        async def work(connection: AsyncConnection) -> tuple[list[r.Run], Cursor]:
            rows, cursor = await _rows(connection, diagnosis_run, organ_id, where, order, page)
            return [await sql_runs.run_of(connection, row) for row in rows], cursor

        return await self._do.read(work)

    async def trace(self, organ_id: str, run_id: str, page: Page) -> tuple[list[r.TraceEvent], Cursor]:
        rows, cursor = await self._page(
            run_trace, organ_id, [run_trace.c.run_id == run_id], ["sequence"], page
        )
        return [sql_rows.from_row(row, r.TraceEvent, sql_rows.TRACE) for row in rows], cursor

    async def evidence(self, organ_id: str, run_id: str, page: Page) -> tuple[list[r.EvidenceHead], Cursor]:
        rows, cursor = await self._page(
            tool_call_record, organ_id, [tool_call_record.c.trace_id == run_id], ["id"], page
        )
        return [sql_calls.head_of(row) for row in rows], cursor

    async def record_stream_end(
        self, organ_id: str, run_id: str, stream_state: StreamState, last_sequence: int
    ) -> bool:
        async def work(connection: AsyncConnection) -> bool:
            ours = diagnosis_run.c.run_id == run_id
            await connection.execute(
                change(diagnosis_run, organ_id, ours, diagnosis_run.c.stream_end.is_(None)).values(
                    stream_end=stream_state.value,
                    stream_last_sequence=last_sequence,
                    update_time=self._clock.now_ms(),
                )
            )
            columns = (diagnosis_run.c.stream_end, diagnosis_run.c.stream_last_sequence)
            row = await row_of(connection, pick(diagnosis_run, organ_id, ours, columns=columns))
            recorded = (stream_state.value, last_sequence)
            return row is not None and (row["stream_end"], row["stream_last_sequence"]) == recorded

        return await self._do.write(work)

    async def _page(
        self,
        table: Table,
        organ_id: str,
        where: Sequence[ColumnElement[bool]],
        order: Sequence[str],
        page: Page,
    ) -> tuple[Rows, Cursor]:
        return await self._do.read(lambda connection: _rows(connection, table, organ_id, where, order, page))


async def _rows(
    connection: AsyncConnection,
    table: Table,
    organ_id: str,
    where: Sequence[ColumnElement[bool]],
    order: Sequence[str],
    page: Page,
) -> tuple[Rows, Cursor]:
    """One page, newest first, and the cursor of the next; a row more is read to know whether there is one."""
    columns = [table.c[name] for name in order]
    conditions = list(where)
    if page.after:
        conditions.append(_older(columns, page.after))
    statement = pick(table, organ_id, *conditions).order_by(*(column.desc() for column in columns))
    rows = await rows_of(connection, statement.limit(page.size + 1))
    if len(rows) <= page.size:
        return rows, ()
    last = rows[page.size - 1]
    return rows[: page.size], tuple(int(last[name] or 0) for name in order)


def _older(columns: Sequence[ColumnElement[Any]], after: Cursor) -> ColumnElement[bool]:
    """The rows that come after a cursor. The first column is bounded apart: an index can use that."""
    if len(after) != len(columns):
        return false()
    condition: ColumnElement[bool] = columns[-1] < after[-1]
    for column, value in reversed(list(zip(columns[:-1], after[:-1], strict=True))):
        condition = or_(column < value, and_(column == value, condition))
    return and_(columns[0] <= after[0], condition)


def _conversation(row: Mapping[str, Any]) -> r.Conversation:
    return r.Conversation(
        conversation_id=row["conversation_id"],
        user_id=row["user_id"],
        active_task_id=row["active_task_id"],
        version=row["fence_version"],
        title=row["title"],
        updated_at=row["update_time"],
    )

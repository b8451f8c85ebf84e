"""Rehydration's reads: a conversation, or one task group, from one consistent snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.adapters import sql_calls, sql_claim, sql_rows
from state_service.adapters.sql_statements import in_conversation, pick, row_of, rows_of
from state_service.adapters.sql_tables import (
    chat_message,
    conversation_entity,
    task_checkpoint,
    task_graph_edge,
    task_graph_node,
    task_instance,
    tool_call_record,
)
from state_service.core.changes import UNRESOLVED
from state_service.core.hot import decode
from state_service.ports import ConversationRows, Scope, TaskRows
from turnfence import records as r


async def conversation(
    connection: AsyncConnection, scope: Scope, dialogue_max: int, records_max: int
) -> ConversationRows | None:
    found = await sql_claim.find(connection, scope)
    if found is None or found["delete_flag"]:
        return None
    row = sql_claim.conversation_row(found)
    return ConversationRows(
        row=row,
        dialogue=await dialogue(connection, scope, dialogue_max),
        records=await _records(connection, scope, records_max),
        entities=await _entities(connection, scope),
        task=await task(connection, scope, row.active_task_id) if row.active_task_id else None,
        unresolved=await _unresolved(connection, scope),
    )


async def dialogue(connection: AsyncConnection, scope: Scope, limit: int) -> tuple[r.DialogueMessage, ...]:
    rows = await rows_of(
        connection,
        pick(chat_message, scope.organ_id, in_conversation(chat_message, scope))
        .order_by(chat_message.c.version.desc(), chat_message.c.idx.desc())
        .limit(limit),
    )
    return tuple(_message(row) for row in reversed(rows))


def _message(row: Mapping[str, Any]) -> r.DialogueMessage:
    return sql_rows.from_row(row, r.DialogueMessage, sql_rows.MESSAGE)


async def node_dialogue(
    connection: AsyncConnection, scope: Scope, task_id: str, node_id: str
) -> tuple[r.DialogueMessage, ...]:
    rows = await rows_of(
        connection,
        pick(
            chat_message,
            scope.organ_id,
            in_conversation(chat_message, scope),
            chat_message.c.task_id == task_id,
            chat_message.c.node_id == node_id,
        ).order_by(chat_message.c.version, chat_message.c.idx),
    )
    return tuple(_message(row) for row in rows)


async def _records(connection: AsyncConnection, scope: Scope, limit: int) -> tuple[r.TaskRecord, ...]:
    rows = await rows_of(
        connection,
        pick(
            task_instance,
            scope.organ_id,
            in_conversation(task_instance, scope),
            task_instance.c.finished_time.is_not(None),
            columns=(task_instance.c.record,),
        )
        .order_by(task_instance.c.finished_time.desc(), task_instance.c.version.desc())
        .limit(limit),
    )
    return tuple(decode(row["record"], r.TaskRecord) for row in rows if row["record"])


async def _entities(connection: AsyncConnection, scope: Scope) -> dict[str, r.EntityEntry]:
    rows = await rows_of(
        connection,
        pick(conversation_entity, scope.organ_id, in_conversation(conversation_entity, scope)).order_by(
            conversation_entity.c.added_seq, conversation_entity.c.id
        ),
    )
    return {
        f"{row['entity_type']}:{row['entity_id']}": sql_rows.from_row(row, r.EntityEntry, sql_rows.ENTITY)
        for row in rows
    }


async def _unresolved(connection: AsyncConnection, scope: Scope) -> tuple[r.EvidenceHead, ...]:
    rows = await rows_of(
        connection,
        pick(
            tool_call_record,
            scope.organ_id,
            in_conversation(tool_call_record, scope),
            tool_call_record.c.live_key.is_not(None),
            tool_call_record.c.call_status.in_(sorted(status.value for status in UNRESOLVED)),
        ),
    )
    return tuple(sql_calls.head_of(row) for row in rows)


async def task(connection: AsyncConnection, scope: Scope, task_id: str) -> TaskRows | None:
    found = await row_of(
        connection,
        pick(
            task_instance,
            scope.organ_id,
            in_conversation(task_instance, scope),
            task_instance.c.task_id == task_id,
        ),
    )
    if found is None:
        return None
    nodes = await rows_of(
        connection, _of_task(task_graph_node, scope, task_id).order_by(task_graph_node.c.id)
    )
    edges = await rows_of(
        connection, _of_task(task_graph_edge, scope, task_id).order_by(task_graph_edge.c.id)
    )
    calls = await rows_of(connection, _of_task(tool_call_record, scope, task_id))
    checkpoint = await row_of(
        connection, _of_task(task_checkpoint, scope, task_id).order_by(task_checkpoint.c.id.desc()).limit(1)
    )
    return TaskRows(
        metadata=sql_rows.from_row(found, r.TaskMetadata, sql_rows.TASK),
        nodes=tuple(sql_rows.from_row(row, r.TaskNode, sql_rows.NODE) for row in nodes),
        edges=tuple(sql_rows.from_row(row, r.TaskEdge, sql_rows.EDGE) for row in edges),
        checkpoint=sql_rows.from_row(checkpoint, r.TaskCheckpoint, sql_rows.CHECKPOINT)
        if checkpoint is not None
        else None,
        shared=decode(found["shared"], dict[str, r.Sourced]) if found["shared"] else {},
        prior=decode(found["prior"], r.Prior) if found["prior"] else None,
        spaces={row["node_id"]: _space(row) for row in nodes},
        calls=tuple(sql_calls.head_of(row) for row in calls),
    )


def _of_task(table: Any, scope: Scope, task_id: str) -> Any:
    return pick(table, scope.organ_id, in_conversation(table, scope), table.c.task_id == task_id)


def _space(row: Mapping[str, Any]) -> r.NodeSpace:
    rest = decode(row["state"], r.NodeSpace) if row["state"] else r.NodeSpace()
    return msgspec.structs.replace(
        rest,
        inputs=decode(row["inputs"], dict[str, r.Sourced]) if row["inputs"] else {},
        outputs=decode(row["outputs"], dict[str, r.Sourced]) if row["outputs"] else {},
    )

"""The commit: everything that was dirty, in one transaction under the locked fence (wire.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.adapters import sql_calls, sql_claim, sql_rows, sql_runs
from state_service.adapters.sql_statements import (
    add_missing,
    change,
    in_conversation,
    stamped,
    upsert,
)
from state_service.adapters.sql_tables import (
    chat_conversation,
    chat_message,
    conversation_entity,
    task_checkpoint,
    task_graph_edge,
    task_graph_node,
    task_instance,
    task_resume_record,
)
from state_service.ports import Commit, PersistBatch, RunEnd, Scope
from turnfence import records as r
from turnfence.records import to_json


async def persist(connection: AsyncConnection, turn: r.TurnRef, batch: PersistBatch, now_ms: int) -> Commit:
    """See ``ports.Commit``."""
    known = await sql_claim.lock(connection, turn)
    if known is None:
        return Commit.FENCED
    if (batch.data_version, batch.persist_seq) < known:
        return Commit.OLDER
    scope = Scope(turn.organ_id, turn.conversation_id)
    await _conversation(connection, scope, batch, now_ms)
    await _messages(connection, scope, batch, now_ms)
    await _tasks(connection, scope, turn, batch, now_ms)
    await _checkpoints(connection, scope, turn, batch, now_ms)
    await _calls(connection, turn, batch, now_ms)
    await _entities(connection, scope, turn, batch, now_ms)
    await sql_runs.trace(connection, scope, turn.version, batch.traces, now_ms)
    counted = await sql_runs.end(connection, scope, batch.run_ends, now_ms)
    await sql_runs.commit(connection, scope, counted, batch.persist_seq, now_ms)
    return await _own_end(connection, turn, batch, counted)


async def _own_end(
    connection: AsyncConnection, turn: r.TurnRef, batch: PersistBatch, counted: Sequence[RunEnd]
) -> Commit:
    """A turn that was given up, or interrupted, before its prepared end came here did not end so."""
    ours = [end for end in batch.run_ends if end.prepared and end.run.run_id == turn.run_id]
    if not ours or ours[0] in counted or await sql_runs.committed(connection, turn.organ_id, turn.run_id):
        return Commit.DONE
    return Commit.ENDED


async def _conversation(connection: AsyncConnection, scope: Scope, batch: PersistBatch, now_ms: int) -> None:
    """The stamp that was drained, and what hangs on the conversation itself."""
    values: dict[str, Any] = {
        "active_task_id": batch.active_task_id,
        "state_version": batch.data_version,
        "persist_seq": batch.persist_seq,
        "last_message_time": now_ms,
        "update_time": now_ms,
    }
    if batch.title is not None:
        values["title"] = batch.title
    if batch.session_shared is not None:
        values["session_shared"] = to_json(batch.session_shared)
    await connection.execute(
        change(
            chat_conversation,
            scope.organ_id,
            in_conversation(chat_conversation, scope),
        ).values(**values)
    )


async def _messages(connection: AsyncConnection, scope: Scope, batch: PersistBatch, now_ms: int) -> None:
    await add_messages(connection, [(scope, message) for message in batch.messages], now_ms)
    for task in batch.tasks:
        if task.source_message_id:
            await connection.execute(
                change(
                    chat_message,
                    scope.organ_id,
                    in_conversation(chat_message, scope),
                    chat_message.c.message_id == task.source_message_id,
                    chat_message.c.task_id == "",
                ).values(task_id=task.task_id)
            )


async def add_messages(
    connection: AsyncConnection, messages: Sequence[tuple[Scope, r.DialogueMessage]], now_ms: int
) -> None:
    """Messages are append-only, known by their id."""
    await add_missing(
        connection,
        chat_message,
        [stamped(s, m.version, now_ms, sql_rows.to_row(m, sql_rows.MESSAGE)) for s, m in messages],
    )


async def _tasks(
    connection: AsyncConnection, scope: Scope, turn: r.TurnRef, batch: PersistBatch, now_ms: int
) -> None:
    tasks = [
        sql_rows.to_row(task, sql_rows.TASK)
        | {
            "shared": to_json(batch.task_shared.get(task.task_id, {})),
            "prior": _json(batch.priors.get(task.task_id)),
            "record": _json(batch.records.get(task.task_id)),
            "state_version": turn.version,
        }
        for task in batch.tasks
    ]
    await upsert(connection, task_instance, [stamped(scope, turn.version, now_ms, t) for t in tasks])
    nodes = [
        sql_rows.to_row(node, sql_rows.NODE)
        | {"task_id": task_id}
        | _space(batch.spaces.get((task_id, node.node_id)))
        for task_id, node in batch.nodes
    ]
    await upsert(connection, task_graph_node, [stamped(scope, turn.version, now_ms, n) for n in nodes])
    edges = [sql_rows.to_row(edge, sql_rows.EDGE) | {"task_id": task_id} for task_id, edge in batch.edges]
    await add_missing(connection, task_graph_edge, [stamped(scope, turn.version, now_ms, e) for e in edges])


def _json(record: Any) -> str:
    return to_json(record) if record is not None else ""


def _space(space: r.NodeSpace | None) -> dict[str, str]:
    """The node space in its three columns: ``state`` holds all of it that is neither input nor output."""
    if space is None:
        return {"inputs": "", "outputs": "", "state": ""}
    rest = r.NodeSpace(state=space.state, rounds=space.rounds, tokens=space.tokens, actions=space.actions)
    return {"inputs": to_json(space.inputs), "outputs": to_json(space.outputs), "state": to_json(rest)}


async def _checkpoints(
    connection: AsyncConnection, scope: Scope, turn: r.TurnRef, batch: PersistBatch, now_ms: int
) -> None:
    """First the consumed ones go, with their resume records; then the open one is written (5.3)."""
    await add_missing(
        connection,
        task_resume_record,
        [
            stamped(scope, turn.version, now_ms, sql_rows.to_row(record, sql_rows.RESUME))
            for record in batch.resumes
        ],
    )
    for checkpoint_id in batch.checkpoints_gone:
        await connection.execute(
            change(
                task_checkpoint,
                scope.organ_id,
                in_conversation(task_checkpoint, scope),
                task_checkpoint.c.checkpoint_id == checkpoint_id,
            ).values(delete_flag=1, update_time=now_ms)
        )
    rows = [
        sql_rows.to_row(checkpoint, sql_rows.CHECKPOINT) | {"task_id": task_id}
        for task_id, checkpoint in batch.checkpoints.items()
    ]
    await upsert(connection, task_checkpoint, [stamped(scope, turn.version, now_ms, row) for row in rows])


async def _calls(connection: AsyncConnection, turn: r.TurnRef, batch: PersistBatch, now_ms: int) -> None:
    for head in batch.calls:
        text = batch.call_payloads.get(head.evidence_id, "")
        if head.payload_id and text:
            await sql_calls.put_payloads(connection, turn, [(head.payload_id, text)], now_ms)
            text = ""
        await sql_calls.write(connection, turn, head, now_ms, response=text)


async def _entities(
    connection: AsyncConnection, scope: Scope, turn: r.TurnRef, batch: PersistBatch, now_ms: int
) -> None:
    rows = []
    for key, entry in batch.entities.items():
        entity_type, _, entity_id = key.partition(":")
        if entry is None:
            await connection.execute(
                change(
                    conversation_entity,
                    scope.organ_id,
                    in_conversation(conversation_entity, scope),
                    conversation_entity.c.entity_type == entity_type,
                    conversation_entity.c.entity_id == entity_id,
                ).values(delete_flag=1, update_time=now_ms)
            )
            continue
        row = sql_rows.to_row(entry, sql_rows.ENTITY)
        row |= {"entity_type": entity_type, "entity_id": entity_id, "added_seq": batch.persist_seq}
        rows.append(stamped(scope, turn.version, now_ms, row))
    await upsert(connection, conversation_entity, rows, keep=("added_seq",))

"""The claim (B2): one transaction in which the turn's version counts in SQL, or nothing happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.adapters import sql_rows, sql_runs
from state_service.adapters.sql_statements import (
    add,
    change,
    in_conversation,
    pick,
    pick_each,
    row_of,
    rows_of,
    stamped,
)
from state_service.adapters.sql_tables import (
    HEAD_COLUMNS,
    chat_conversation,
    chat_message,
    diagnosis_run,
    tool_call_record,
)
from state_service.core.hot import decode
from state_service.ports import CallRow, Claim, ClaimKind, ConversationRow, RunStart, Scope
from turnfence import records as r
from turnfence.axes import RunState


def conversation_row(row: Mapping[str, Any]) -> ConversationRow:
    return ConversationRow(
        user_id=row["user_id"],
        title=row["title"],
        active_task_id=row["active_task_id"],
        session_shared=decode(row["session_shared"], dict[str, r.Sourced]) if row["session_shared"] else {},
        state_version=row["state_version"],
        persist_seq=row["persist_seq"],
        fence_version=row["fence_version"],
        deleted=bool(row["delete_flag"]),
        fence_trace=row["fence_trace"],
        updated_at=row["update_time"],
    )


async def find(connection: AsyncConnection, scope: Scope) -> Mapping[str, Any] | None:
    """The conversation's row, deleted or not."""
    return await row_of(
        connection,
        pick(chat_conversation, scope.organ_id, in_conversation(chat_conversation, scope), deleted=True),
    )


Stamp = tuple[int, int]


async def lock(connection: AsyncConnection, turn: r.TurnRef) -> Stamp | None:
    """Lock the conversation's row and see whether this turn still holds the fence: by equality. The stamp
    of what SQL has (state_version, persist_seq); None: fenced."""
    scope = Scope(turn.organ_id, turn.conversation_id)
    row = await row_of(
        connection,
        pick(
            chat_conversation,
            scope.organ_id,
            in_conversation(chat_conversation, scope),
            columns=(
                chat_conversation.c.fence_version,
                chat_conversation.c.fence_trace,
                chat_conversation.c.state_version,
                chat_conversation.c.persist_seq,
            ),
        ).with_for_update(),
    )
    if row is None or (row["fence_version"], row["fence_trace"]) != (turn.version, turn.run_id):
        return None
    return row["state_version"], row["persist_seq"]


async def lock_free(connection: AsyncConnection, scopes: Sequence[Scope]) -> dict[Scope, tuple[int, str]]:
    """Lock the rows of those conversations that nobody holds, in one order: their fences (version, run). One
    that is missing is held by somebody, or is not there."""
    c = chat_conversation.c
    columns = (c.organ_id, c.conversation_id, c.fence_version, c.fence_trace)
    statement = pick_each(chat_conversation, scopes, columns=columns)
    ordered = statement.order_by(c.organ_id, c.conversation_id).with_for_update(skip_locked=True)
    return {
        Scope(row["organ_id"], row["conversation_id"]): (row["fence_version"], row["fence_trace"])
        for row in await rows_of(connection, ordered)
    }


class KnownMessage(Exception):
    """Two first calls with one message id raced, and the other won."""


async def claim(
    connection: AsyncConnection, scope: Scope, user_id: str, version: int, start: RunStart, now_ms: int
) -> Claim:
    """See ``ColdStore.claim``; nothing was written unless it is CLAIMED."""
    known = None
    if start.message_id:
        known = await sql_runs.by_message(connection, scope.organ_id, start.message_id)
    if known is not None and not _begins_again(known, start):
        if known["user_id"] != user_id:
            return Claim(ClaimKind.KNOWN_MESSAGE)  # whose it is and how it went is not this caller's business
        existing = await sql_runs.run_of(connection, known)
        return Claim(ClaimKind.KNOWN_MESSAGE, existing=existing, existing_hash=known["input_hash"])
    raised = await connection.execute(
        change(
            chat_conversation,
            scope.organ_id,
            in_conversation(chat_conversation, scope),
            chat_conversation.c.user_id == user_id,
            chat_conversation.c.fence_version < version,
        ).values(fence_version=version, fence_trace=start.run_id, update_time=now_ms)
    )
    if not raised.rowcount:
        refused = await _not_raised(connection, scope, user_id, version, start.run_id, now_ms)
        if refused is not None:
            return refused
    row = await find(connection, scope)
    assert row is not None
    if known is None and start.message_id:
        await _start_run(connection, scope, user_id, version, start, now_ms)
    elif known is not None and known["version"] != version:
        await sql_runs.move(connection, scope.organ_id, start.run_id, version, now_ms)
    return await _claimed(connection, scope, conversation_row(row), version)


def _begins_again(known: Mapping[str, Any], start: RunStart) -> bool:
    """A begin that is repeated because its answer was lost; one whose run has ended is over."""
    return bool(known["run_id"] == start.run_id and known["run_state"] == RunState.RUNNING.value)


async def _not_raised(
    connection: AsyncConnection, scope: Scope, user_id: str, version: int, run_id: str, now_ms: int
) -> Claim | None:
    """Why the fence was not raised; None: it is ours (a repeat, or a row just made)."""
    row = await find(connection, scope)
    if row is None:
        new = {
            "user_id": user_id,
            "title": "",
            "active_task_id": "",
            "session_shared": "",
            "state_version": 0,
            "persist_seq": 0,
            "fence_version": version,
            "fence_trace": run_id,
            "last_message_time": now_ms,
        }
        await add(connection, chat_conversation, stamped(scope, version, now_ms, new))
        return None
    if row["delete_flag"]:
        return Claim(ClaimKind.DELETED)
    if row["user_id"] != user_id:
        return Claim(ClaimKind.FORBIDDEN)
    if (row["fence_version"], row["fence_trace"]) == (version, run_id):
        return None
    return Claim(ClaimKind.BEHIND, fence_version=row["fence_version"])


async def _start_run(
    connection: AsyncConnection, scope: Scope, user_id: str, version: int, start: RunStart, now_ms: int
) -> None:
    row = sql_runs.empty_row() | {
        "run_id": start.run_id,
        "message_id": start.message_id,
        "input_hash": start.input_hash,
        "user_id": user_id,
        "agent_id": start.agent_id,
        "query": start.query,
        "status": RunState.RUNNING.value,
        "run_state": RunState.RUNNING.value,
        "started_time": start.started_at,
    }
    try:
        await add(connection, diagnosis_run, stamped(scope, version, now_ms, row))
    except IntegrityError as error:
        raise KnownMessage from error


async def _claimed(connection: AsyncConnection, scope: Scope, row: ConversationRow, version: int) -> Claim:
    """What S1–S3 may have left in SQL alone: rows from the version on that was persisted last."""
    since = row.state_version
    messages = await rows_of(
        connection,
        pick(
            chat_message,
            scope.organ_id,
            in_conversation(chat_message, scope),
            chat_message.c.version >= since,
            chat_message.c.version < version,
        ).order_by(chat_message.c.version, chat_message.c.idx),
    )
    calls = await rows_of(
        connection,
        pick(
            tool_call_record,
            scope.organ_id,
            in_conversation(tool_call_record, scope),
            tool_call_record.c.version >= since,
            tool_call_record.c.version < version,
            columns=(*HEAD_COLUMNS, tool_call_record.c.version),
        ),
    )
    unfinished = await rows_of(
        connection,
        pick(
            diagnosis_run,
            scope.organ_id,
            in_conversation(diagnosis_run, scope),
            diagnosis_run.c.run_state == RunState.RUNNING.value,
            diagnosis_run.c.version < version,
            columns=(diagnosis_run.c.run_id,),
        ),
    )
    return Claim(
        ClaimKind.CLAIMED,
        row=row,
        fence_version=version,
        messages=tuple(sql_rows.from_row(m, r.DialogueMessage, sql_rows.MESSAGE) for m in messages),
        calls=tuple(
            CallRow(sql_rows.from_row(c, r.EvidenceHead, sql_rows.CALL), c["version"]) for c in calls
        ),
        unfinished=tuple(u["run_id"] for u in unfinished),
    )

"""S2 and S3 in SQL: ``tool_call_record`` is never upserted (state document 5.4; design: state.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, or_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.adapters import sql_rows
from state_service.adapters.sql_statements import (
    add,
    add_missing,
    change,
    in_conversation,
    pick,
    pick_each,
    row_of,
    rows_of,
    stamped,
)
from state_service.adapters.sql_tables import HEAD_COLUMNS, task_node_payload, tool_call_record
from state_service.core.changes import UNRESOLVED
from state_service.ports import S2, ColdCall, S2Result, Scope
from turnfence import records as r
from turnfence.axes import CallStatus, SideEffect

_OPEN = sorted(status.value for status in UNRESOLVED)
_STEM = 32  # of a live key: what calls of one tool and key have in common, even where one has had to differ


def live_key(head: r.EvidenceHead) -> str | None:
    """The unique key of a write that happened or may have: a second registration is impossible while
    it lives, even with Redis empty. NULL when it provably had no effect."""
    if head.side_effect is not SideEffect.WRITE or not head.idempotency_key:
        return None
    done = head.status is CallStatus.SUCCESS and bool(head.business_ok)
    if not done and head.status not in UNRESOLVED:
        return None
    return _digest(head)


def _digest(head: r.EvidenceHead) -> str:
    return hashlib.sha256(f"{head.tool_name}|{head.idempotency_key}".encode()).hexdigest()


def head_of(row: Mapping[str, Any]) -> r.EvidenceHead:
    return sql_rows.from_row(row, r.EvidenceHead, sql_rows.CALL)


class Duplicate(Exception):
    """The unique key refused the registration."""


class Registration(NamedTuple):
    turn: r.TurnRef
    head: r.EvidenceHead
    request_json: str

    @property
    def scope(self) -> Scope:
        return Scope(self.turn.organ_id, self.turn.conversation_id)


async def register(connection: AsyncConnection, asked: Sequence[Registration], now_ms: int) -> list[S2Result]:
    """S2: a plain INSERT of those that nothing bars, one of each conversation, whose fences are locked.
    Raises ``Duplicate`` when a race lost to the key."""
    calls = tool_call_record.c
    mine = await _found(connection, asked, [calls.call_id == one.head.evidence_id for one in asked])
    new = [one for one in asked if one.scope not in mine]
    bars = await barring(connection, new)
    results = [_answer(one, mine, bars) for one in asked]
    rows = [
        _row(one.turn, one.head, now_ms, live_key(one.head)) | {"request": one.request_json, "response": ""}
        for one, result in zip(asked, results, strict=True)
        if result.kind is S2.INSERTED
    ]
    if rows:
        try:
            await add(connection, tool_call_record, *rows)
        except IntegrityError as error:
            raise Duplicate from error
    return results


Heads = dict[Scope, r.EvidenceHead]


def _answer(one: Registration, mine: Heads, bars: Heads) -> S2Result:
    if one.scope in mine:
        return S2Result(S2.MINE, mine[one.scope])
    if one.scope in bars:
        return S2Result(S2.DUPLICATE, bars[one.scope])
    return S2Result(S2.INSERTED, one.head)


async def barring(connection: AsyncConnection, asked: Sequence[Registration]) -> Heads:
    """A live write with the same tool and key in the task, or an unresolved one in any task."""
    calls = tool_call_record.c
    conditions = []
    for one in asked:
        stem = _digest(one.head)[:_STEM]
        counts = or_(calls.task_id == one.head.task_id, calls.call_status.in_(_OPEN))
        conditions.append(and_(calls.live_key.between(stem, f"{stem}~"), counts))
    return await _found(connection, asked, conditions)


async def _found(
    connection: AsyncConnection, asked: Sequence[Registration], conditions: Sequence[ColumnElement[bool]]
) -> Heads:
    """One call of each conversation for which its condition holds, if there is one."""
    if not asked:
        return {}
    columns = (*HEAD_COLUMNS, tool_call_record.c.conversation_id, tool_call_record.c.organ_id)
    scopes = [one.scope for one in asked]
    rows = await rows_of(connection, pick_each(tool_call_record, scopes, conditions, columns=columns))
    return {Scope(row["organ_id"], row["conversation_id"]): head_of(row) for row in rows}


async def _own_key(connection: AsyncConnection, turn: r.TurnRef, head: r.EvidenceHead) -> str | None:
    """The live key; if another call of the task has it, one with the same stem that is this call's alone:
    both had an effect, and a record that the key refused would be lost."""
    key = live_key(head)
    if key is None:
        return None
    calls = tool_call_record.c
    others = (
        calls.task_id == head.task_id,
        calls.live_key == key,
        calls.call_id != head.evidence_id,
    )
    taken = await row_of(connection, pick(tool_call_record, turn.organ_id, *others, columns=(calls.call_id,)))
    if taken is None:
        return key
    return key[:_STEM] + hashlib.sha256(head.evidence_id.encode()).hexdigest()[:_STEM]


def _row(turn: r.TurnRef, head: r.EvidenceHead, now_ms: int, key: str | None) -> dict[str, Any]:
    scope = Scope(turn.organ_id, turn.conversation_id)
    row = sql_rows.to_row(head, sql_rows.CALL) | {"live_key": key}
    return stamped(scope, turn.version, now_ms, row)


class Settling(NamedTuple):
    turn: r.TurnRef
    calls: Sequence[ColdCall]


async def settle(
    connection: AsyncConnection, turn: r.TurnRef, calls: Sequence[ColdCall], now_ms: int
) -> None:
    """S3, under the locked fence: UPDATE by call id, else INSERT."""
    await put_payloads(
        connection,
        turn,
        [(call.head.payload_id, call.payload_json) for call in calls if call.head.payload_id],
        now_ms,
    )
    for call in calls:
        inline = "" if call.head.payload_id else call.payload_json
        await write(connection, turn, call.head, now_ms, request=call.request_json, response=inline)


async def write(
    connection: AsyncConnection,
    turn: r.TurnRef,
    head: r.EvidenceHead,
    now_ms: int,
    *,
    request: str = "",
    response: str = "",
) -> None:
    """A head as it is now. A call that is settled in SQL is never made unsettled again: the settled
    state wins, whichever side has it."""
    row = _row(turn, head, now_ms, await _own_key(connection, turn, head))
    row |= {name: text for name, text in (("request", request), ("response", response)) if text}
    changed = {name: value for name, value in row.items() if name not in _FIXED}
    condition = [
        in_conversation(tool_call_record, Scope(turn.organ_id, turn.conversation_id)),
        tool_call_record.c.call_id == head.evidence_id,
    ]
    if head.status in UNRESOLVED:
        condition.append(tool_call_record.c.call_status.in_(_OPEN))
    updated = await connection.execute(change(tool_call_record, turn.organ_id, *condition).values(**changed))
    if updated.rowcount:
        return
    await add_missing(connection, tool_call_record, [{"request": request, "response": response, **row}])


_FIXED = frozenset({"organ_id", "conversation_id", "call_id", "create_time", "delete_flag", "version"})


async def put_payloads(
    connection: AsyncConnection,
    turn: r.TurnRef,
    payloads: Iterable[tuple[str, str]],
    now_ms: int,
    payload_type: str = "ARTIFACT",
) -> None:
    scope = Scope(turn.organ_id, turn.conversation_id)
    await add_missing(
        connection,
        task_node_payload,
        [
            stamped(
                scope,
                turn.version,
                now_ms,
                {"payload_id": payload_id, "payload_type": payload_type, "payload_data": data},
            )
            for payload_id, data in payloads
            if data
        ],
    )


async def payload(connection: AsyncConnection, scope: Scope, payload_id: str) -> str | None:
    row = await row_of(
        connection,
        pick(
            task_node_payload,
            scope.organ_id,
            in_conversation(task_node_payload, scope),
            task_node_payload.c.payload_id == payload_id,
        ),
    )
    return row["payload_data"] if row is not None else None


async def call_payload(
    connection: AsyncConnection, scope: Scope, task_id: str, evidence_id: str
) -> str | None:
    """``response``, else what ``payload_id`` points to (state document 5.10)."""
    row = await row_of(
        connection,
        pick(
            tool_call_record,
            scope.organ_id,
            in_conversation(tool_call_record, scope),
            tool_call_record.c.task_id == task_id,
            tool_call_record.c.call_id == evidence_id,
            columns=(tool_call_record.c.response, tool_call_record.c.payload_id),
        ),
    )
    if row is None:
        return None
    if row["response"]:
        return str(row["response"])
    return await payload(connection, scope, row["payload_id"]) if row["payload_id"] else None


async def heads(
    connection: AsyncConnection, scope: Scope, evidence_ids: Sequence[str]
) -> list[r.EvidenceHead]:
    found = await rows_of(
        connection,
        pick(
            tool_call_record,
            scope.organ_id,
            in_conversation(tool_call_record, scope),
            tool_call_record.c.call_id.in_(evidence_ids),
            columns=HEAD_COLUMNS,
        ),
    )
    return [head_of(row) for row in found]


async def requests(connection: AsyncConnection, scope: Scope, evidence_ids: Sequence[str]) -> dict[str, str]:
    found = await rows_of(
        connection,
        pick(
            tool_call_record,
            scope.organ_id,
            in_conversation(tool_call_record, scope),
            tool_call_record.c.call_id.in_(evidence_ids),
            columns=(tool_call_record.c.call_id, tool_call_record.c.request),
        ),
    )
    return {row["call_id"]: row["request"] for row in found if row["request"]}

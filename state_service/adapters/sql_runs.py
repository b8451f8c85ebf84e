"""Runs in SQL: their rows, their ends, their timeline (lifecycle document 12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.adapters import sql_rows
from state_service.adapters.sql_statements import (
    add_missing,
    change,
    in_conversation,
    pick,
    row_of,
    stamped,
)
from state_service.adapters.sql_tables import diagnosis_run, run_trace, turn_commit
from state_service.core.hot import decode
from state_service.ports import RunEnd, Scope
from turnfence import records as r
from turnfence.axes import Durability, IntentType, ReleaseOutcome, RunState, StreamState
from turnfence.records import to_json

# ReleaseOutcome → diagnosis_run.status: processed normally is SUCCESS, with a conclusion or without (12.2).
ROW_STATUS = {
    ReleaseOutcome.SUCCESS: "SUCCESS",
    ReleaseOutcome.FALLBACK: "SUCCESS",
    ReleaseOutcome.FAILED: "FAILED",
    ReleaseOutcome.CANCELLED: "CANCELLED",
}

# Fields of a run that other columns, or other tables, hold.
_ELSEWHERE = frozenset({"run_id", "conversation_id", "message_id", "version", "durability"})
# What a run's start has written and an end without it must not blank.
_KEPT = frozenset({"agent_id", "task_id", "started_at"})


def empty_row() -> dict[str, Any]:
    """Defaults of the columns that a run's start does not set."""
    return {
        "query": "",
        "query_cut": False,
        "task_id": "",
        "error_code": "",
        "limits": "",
        "usage_json": "",
        "answer": "",
        "conclusion": "",
        "published_result": "",
        "closing_events": "",
        "duration_ms": 0,
        "tokens": 0,
        "agent_steps": 0,
        "tool_calls": 0,
    }


async def by_message(connection: AsyncConnection, organ_id: str, message_id: str) -> Mapping[str, Any] | None:
    return await row_of(connection, pick(diagnosis_run, organ_id, diagnosis_run.c.message_id == message_id))


async def by_id(connection: AsyncConnection, organ_id: str, run_id: str) -> Mapping[str, Any] | None:
    return await row_of(connection, pick(diagnosis_run, organ_id, diagnosis_run.c.run_id == run_id))


async def committed(connection: AsyncConnection, organ_id: str, run_id: str) -> bool:
    row = await row_of(
        connection,
        pick(turn_commit, organ_id, turn_commit.c.run_id == run_id, columns=(turn_commit.c.run_id,)),
    )
    return row is not None


async def run_of(connection: AsyncConnection, row: Mapping[str, Any]) -> r.Run:
    """The run of a row; ``durability`` is PERSISTED exactly when its ``turn_commit`` row exists."""
    durability = None
    if row["run_state"] != RunState.RUNNING.value:
        has_commit = await committed(connection, row["organ_id"], row["run_id"])
        durability = Durability.PERSISTED if has_commit else None
    run = sql_rows.from_row(row, r.Run, sql_rows.RUN, durability=durability)
    if row["stream_end"]:
        return msgspec.structs.replace(run, stream_state=StreamState(row["stream_end"]))
    return run


async def move(connection: AsyncConnection, organ_id: str, run_id: str, version: int, now_ms: int) -> None:
    """A run whose begin was repeated after its lease had passed goes on under its new version."""
    ours = (diagnosis_run.c.run_id == run_id, diagnosis_run.c.run_state == RunState.RUNNING.value)
    await connection.execute(
        change(diagnosis_run, organ_id, *ours).values(version=version, update_time=now_ms)
    )


async def end(connection: AsyncConnection, scope: Scope, ends: Sequence[RunEnd], now_ms: int) -> list[RunEnd]:
    """Write how runs ended: a run that has an end keeps it. Answers the ends that count."""
    counted = []
    for one in ends:
        conditions = (
            in_conversation(diagnosis_run, scope),
            diagnosis_run.c.run_id == one.run.run_id,
            diagnosis_run.c.run_state == RunState.RUNNING.value,
        )
        ended = await connection.execute(
            change(diagnosis_run, scope.organ_id, *conditions).values(**_end_row(one), update_time=now_ms)
        )
        if ended.rowcount:
            counted.append(one)
    return counted


def _end_row(end: RunEnd) -> dict[str, Any]:
    run = end.run
    row = sql_rows.to_row(run, sql_rows.RUN, leave=_ELSEWHERE)
    row = {n: v for n, v in row.items() if v not in (None, "") or n not in _kept_columns()}
    usage = run.usage
    status = ROW_STATUS.get(run.release_outcome, "FAILED") if run.release_outcome else "FAILED"
    return row | {
        "status": status,
        "conclusion": _conclusion(run),
        "published_result": end.published_result,
        "closing_events": to_json(list(end.closing_events)) if end.closing_events else "",
        "duration_ms": usage.duration or 0,
        "tokens": usage.prompt_tokens + usage.completion_tokens,
        "agent_steps": usage.agent_steps,
        "tool_calls": usage.tool_calls,
    }


def _kept_columns() -> frozenset[str]:
    return frozenset(sql_rows.RUN.get(name, name) for name in _KEPT)


def _conclusion(run: r.Run) -> str:
    body = run.answer.body if run.answer is not None else None
    return body.conclusion if isinstance(body, r.DiagnosisReport) else ""


async def commit(
    connection: AsyncConnection, scope: Scope, ends: Sequence[RunEnd], persist_seq: int, now_ms: int
) -> None:
    """``turn_commit`` of every prepared run, of the ends that count; a duplicate in a retry is success."""
    await add_missing(
        connection,
        turn_commit,
        [
            stamped(
                scope,
                one.run.version,
                now_ms,
                {"run_id": one.run.run_id, "persist_seq": persist_seq},
            )
            for one in ends
            if one.prepared
        ],
    )


async def trace(
    connection: AsyncConnection,
    scope: Scope,
    version: int,
    events: Sequence[tuple[str, r.TraceEvent]],
    now_ms: int,
) -> None:
    await add_missing(
        connection,
        run_trace,
        [
            stamped(scope, version, now_ms, {"run_id": run_id, **sql_rows.to_row(event, sql_rows.TRACE)})
            for run_id, event in events
        ],
    )


def closing_events_of(row: Mapping[str, Any] | None) -> tuple[r.TurnEvent, ...]:
    if row is None or not row["closing_events"]:
        return ()
    return tuple(decode(row["closing_events"], list[r.TurnEvent]))


async def previous_turn(connection: AsyncConnection, scope: Scope) -> r.PreviousTurn | None:
    """The last ended turn, if it was DIAGNOSIS + SUCCESS with a published result."""
    row = await row_of(
        connection,
        pick(
            diagnosis_run,
            scope.organ_id,
            in_conversation(diagnosis_run, scope),
            diagnosis_run.c.run_state != RunState.RUNNING.value,
            columns=(
                diagnosis_run.c.run_id,
                diagnosis_run.c.query,
                diagnosis_run.c.intent,
                diagnosis_run.c.release_outcome,
                diagnosis_run.c.published_result,
                diagnosis_run.c.finished_time,
            ),
        )
        .order_by(diagnosis_run.c.version.desc())
        .limit(1),
    )
    if row is None or not row["published_result"]:
        return None
    if (row["intent"], row["release_outcome"]) != (IntentType.DIAGNOSIS, ReleaseOutcome.SUCCESS):
        return None
    return r.PreviousTurn(
        run_id=row["run_id"],
        query=row["query"],
        published_result=row["published_result"],
        finished_at=row["finished_time"],
    )

"""A cold store of a test's own, what really lies in its tables, and small stories told to the port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from sqlalchemy import Table, select, update

from state_service.adapters import sql_migrate
from state_service.adapters.sql_cold import SqlCold
from state_service.adapters.sql_engine import Transactions, create_engine
from state_service.adapters.sql_tables import chat_conversation, metadata
from state_service.ports import Claim, ClaimKind, PersistBatch, RunEnd, RunStart, Scope
from tests.contract.turns import NOW, hash_of, new_id
from turnfence import records as r
from turnfence.axes import (
    CallStatus,
    DialogueRole,
    IntentType,
    MessageType,
    ReleaseOutcome,
    RunState,
    SideEffect,
    TerminationReason,
    TurnMode,
    TurnStatus,
)
from turnfence.serving.process import SystemClock

# What SQL must give back unchanged: four-byte characters, quotes, escapes, place holders, outer blanks.
AWKWARD = " 设备离线 😀 'it''s' \"q\" \\n \\ % %s :x {y} -- ; Straße\tI\r\nİ \u200b "


class SqlBench:
    """A store over one database. ``SqlBench`` objects over one URL are as many replicas of the service."""

    def __init__(self, url: str, *, timeout: float = 5.0, connections: int = 8) -> None:
        self.url = url
        self.engine = create_engine(url, timeout=timeout, connections=connections)
        self.transactions = Transactions(self.engine, timeout=timeout)
        self.cold = SqlCold(self.transactions, SystemClock())

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    async def dump(self, organ_id: str) -> dict[str, list[dict[str, Any]]]:
        """Every row of an organisation, but for what the store numbers or stamps itself."""
        found = {}
        async with self.engine.connect() as connection:
            for table in metadata.sorted_tables:
                statement = select(table).where(table.c.organ_id == organ_id).order_by(table.c.id)
                rows = (await connection.execute(statement)).mappings()
                found[table.name] = [_plain(row) for row in rows]
        return {name: rows for name, rows in found.items() if rows}

    async def rows(self, table: Table, organ_id: str) -> list[dict[str, Any]]:
        return (await self.dump(organ_id)).get(table.name, [])

    async def delete(self, scope: Scope) -> None:
        """Mark a conversation as deleted."""
        ours = (chat_conversation.c.organ_id, chat_conversation.c.conversation_id)
        async with self.engine.begin() as connection:
            await connection.execute(
                update(chat_conversation)
                .where(ours[0] == scope.organ_id, ours[1] == scope.conversation_id)
                .values(delete_flag=1)
            )


def _plain(row: Any) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("id", "create_time", "update_time")}


@asynccontextmanager
async def opened(url: str, *, timeout: float = 5.0, connections: int = 8) -> AsyncIterator[SqlBench]:
    """A bench with its tables made."""
    bench = SqlBench(url, timeout=timeout, connections=connections)
    try:
        await sql_migrate.upgrade(bench.engine)
        yield bench
    finally:
        await bench.cold.close()


class Story:
    """A conversation that nobody else knows, with fresh ids unless some are given."""

    def __init__(self, cold: SqlCold, *, organ_id: str = "", conversation_id: str = "") -> None:
        self.cold = cold
        self.scope = Scope(organ_id or new_id(), conversation_id or new_id())
        self.user_id = new_id()

    def start(self, run_id: str = "", **changed: Any) -> RunStart:
        start = RunStart(
            run_id=run_id or new_id(),
            message_id=new_id(),
            input_hash=hash_of("hello"),
            query="hello",
            agent_id="ops",
            started_at=NOW,
        )
        return msgspec.structs.replace(start, **changed)

    async def claim(self, version: int, start: RunStart | None = None, *, user_id: str = "") -> Claim:
        return await self.cold.claim(
            self.scope,
            user_id=user_id or self.user_id,
            version=version,
            start=start or self.start(),
            now_ms=NOW,
        )

    async def begin(self, version: int, **start: Any) -> r.TurnRef:
        """A turn whose claim was taken."""
        asked = self.start(**start)
        claim = await self.claim(version, asked)
        assert claim.kind is ClaimKind.CLAIMED, claim
        return self.turn(version, asked.run_id)

    def turn(self, version: int, run_id: str) -> r.TurnRef:
        return r.TurnRef(
            organ_id=self.scope.organ_id,
            conversation_id=self.scope.conversation_id,
            run_id=run_id,
            version=version,
            lease_token="token",
        )


def message(turn: r.TurnRef, **changed: Any) -> r.DialogueMessage:
    said = r.DialogueMessage(
        message_id=new_id(),
        role=DialogueRole.USER,
        type=MessageType.USER_TEXT,
        text=AWKWARD,
        trace_id=turn.run_id,
        task_id="t1",
        node_id="n1",
        round=3,
        created_at=NOW,
        version=turn.version,
        idx=1,
        release_outcome=ReleaseOutcome.SUCCESS,
    )
    return msgspec.structs.replace(said, **changed)


def write_head(turn: r.TurnRef, **changed: Any) -> r.EvidenceHead:
    """A write as it is registered."""
    head = r.EvidenceHead(
        evidence_id=new_id(),
        task_id="t1",
        node_id="n1",
        tool_name="restart",
        side_effect=SideEffect.WRITE,
        status=CallStatus.STARTED,
        idempotency_key=hash_of("web-1"),
        args_hash=hash_of('{"host":"web-1"}'),
        trace_id=turn.run_id,
        started_at=NOW,
    )
    return msgspec.structs.replace(head, **changed)


def run_of(turn: r.TurnRef, **changed: Any) -> r.Run:
    """How the turn's run ended: a diagnosis that was released."""
    run = r.Run(
        run_id=turn.run_id,
        conversation_id=turn.conversation_id,
        version=turn.version,
        agent_id="ops",
        intent=IntentType.DIAGNOSIS,
        turn_mode=TurnMode.START_FRESH,
        run_state=RunState.SUCCESS,
        termination_reason=TerminationReason.COMPLETED,
        release_outcome=ReleaseOutcome.SUCCESS,
        turn_status=TurnStatus.DONE,
        finished_at=NOW + 5,
    )
    return msgspec.structs.replace(run, **changed)


def batch(turn: r.TurnRef, **changed: Any) -> PersistBatch:
    """The commit of a turn that did nothing but end."""
    end = RunEnd(run=run_of(turn), closing_events=(), prepared=True, published_result="{}")
    whole = PersistBatch(active_task_id="", data_version=turn.version, persist_seq=7, run_ends=(end,))
    return msgspec.structs.replace(whole, **changed)

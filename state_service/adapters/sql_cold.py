"""SqlCold: the cold store over SQLAlchemy, a transaction for each method (see ``ports.ColdStore``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.adapters import sql_calls, sql_claim, sql_load, sql_persist, sql_runs
from state_service.adapters.sql_calls import Duplicate, Registration, Settling
from state_service.adapters.sql_claim import KnownMessage
from state_service.adapters.sql_engine import Transactions
from state_service.adapters.sql_groups import Groups
from state_service.ports import (
    S2,
    Claim,
    ClaimKind,
    Clock,
    ColdCall,
    Commit,
    ConversationRow,
    ConversationRows,
    PersistBatch,
    RunEnd,
    RunStart,
    S2Result,
    Scope,
    StoreCorrupt,
    TaskRows,
)
from turnfence import records as r

RACES = 3  # two first calls on one key: the loser looks again


class Said(NamedTuple):
    turn: r.TurnRef
    message: r.DialogueMessage


class SqlCold:
    """``ports.ColdStore`` on MySQL, MariaDB and SQLite."""

    def __init__(self, transactions: Transactions, clock: Clock) -> None:
        self._do = transactions
        self._clock = clock
        self._messages = Groups(transactions, self._say, fenced=False)
        self._registrations = Groups(transactions, self._register, fenced=S2Result(S2.FENCED))
        self._settlements = Groups(transactions, self._settle, fenced=False)

    async def conversation(self, scope: Scope) -> ConversationRow | None:
        row = await self._do.read(lambda connection: sql_claim.find(connection, scope))
        return sql_claim.conversation_row(row) if row is not None else None

    async def claim(self, scope: Scope, *, user_id: str, version: int, start: RunStart, now_ms: int) -> Claim:
        for _ in range(RACES):
            try:
                return await self._do.write(
                    lambda connection: sql_claim.claim(connection, scope, user_id, version, start, now_ms)
                )
            except (KnownMessage, IntegrityError):
                continue
        return Claim(ClaimKind.BEHIND, fence_version=version)

    async def load_conversation(
        self, scope: Scope, *, dialogue_max: int, records_max: int
    ) -> ConversationRows | None:
        return await self._do.read(
            lambda connection: sql_load.conversation(connection, scope, dialogue_max, records_max)
        )

    async def load_task(self, scope: Scope, task_id: str) -> TaskRows | None:
        return await self._do.read(lambda connection: sql_load.task(connection, scope, task_id))

    async def insert_message(self, turn: r.TurnRef, message: r.DialogueMessage) -> bool:
        return await self._messages.put(Said(turn, message))

    async def register_call(self, turn: r.TurnRef, head: r.EvidenceHead, request_json: str) -> S2Result:
        asked = Registration(turn, head, request_json)
        for _ in range(RACES):
            try:
                return await self._registrations.put(asked)
            except Duplicate:
                continue
        found = await self._do.read(lambda connection: sql_calls.barring(connection, [asked]))
        if not found:
            raise StoreCorrupt("a unique key refuses a write that no row explains")
        return S2Result(S2.DUPLICATE, found[asked.scope])

    async def settle_calls(self, turn: r.TurnRef, calls: Sequence[ColdCall]) -> bool:
        return await self._settlements.put(Settling(turn, calls))

    # What a group does, its fences locked.

    async def _say(self, connection: AsyncConnection, asked: list[Said]) -> list[bool]:
        said = [(_scope(one.turn), one.message) for one in asked]
        await sql_persist.add_messages(connection, said, self._clock.now_ms())
        return [True] * len(asked)

    async def _register(self, connection: AsyncConnection, asked: list[Registration]) -> list[S2Result]:
        return await sql_calls.register(connection, asked, self._clock.now_ms())

    async def _settle(self, connection: AsyncConnection, asked: list[Settling]) -> list[bool]:
        for one in asked:
            await sql_calls.settle(connection, one.turn, one.calls, self._clock.now_ms())
        return [True] * len(asked)

    async def put_payload(self, turn: r.TurnRef, *, payload_id: str, payload_type: str, data: str) -> bool:
        async def work(connection: AsyncConnection) -> bool:
            if await sql_claim.lock(connection, turn) is None:
                return False
            await sql_calls.put_payloads(
                connection, turn, [(payload_id, data)], self._clock.now_ms(), payload_type
            )
            return True

        return await self._do.write(work)

    async def persist(self, turn: r.TurnRef, batch: PersistBatch, *, now_ms: int) -> Commit:
        return await self._do.write(lambda connection: sql_persist.persist(connection, turn, batch, now_ms))

    async def committed(self, organ_id: str, run_id: str) -> bool:
        return await self._do.read(lambda connection: sql_runs.committed(connection, organ_id, run_id))

    async def interrupt(self, turn: r.TurnRef, ends: Sequence[RunEnd]) -> bool:
        async def work(connection: AsyncConnection) -> bool:
            if await sql_claim.lock(connection, turn) is None:
                return False
            await sql_runs.end(connection, _scope(turn), ends, self._clock.now_ms())
            return True

        return await self._do.write(work)

    async def give_up(self, scope: Scope, end: RunEnd) -> None:
        await self._do.write(lambda connection: sql_runs.end(connection, scope, [end], self._clock.now_ms()))

    async def calls(self, scope: Scope, evidence_ids: Sequence[str]) -> list[r.EvidenceHead]:
        return await self._do.read(lambda connection: sql_calls.heads(connection, scope, evidence_ids))

    async def append_late_trace(self, scope: Scope, run_id: str, trace: r.TraceEvent) -> None:
        async def work(connection: AsyncConnection) -> None:
            row = await sql_claim.find(connection, scope)
            if row is not None and not row["delete_flag"]:  # what was erased stays so
                await sql_runs.trace(connection, scope, 0, [(run_id, trace)], self._clock.now_ms())

        await self._do.write(work)

    async def run(self, organ_id: str, user_id: str, run_id: str) -> r.Run | None:
        async def work(connection: AsyncConnection) -> r.Run | None:
            row = await sql_runs.by_id(connection, organ_id, run_id)
            if row is None or row["user_id"] != user_id:
                return None
            return await sql_runs.run_of(connection, row)

        return await self._do.read(work)

    async def run_by_message(self, organ_id: str, message_id: str) -> tuple[r.Run, str, str] | None:
        async def work(connection: AsyncConnection) -> tuple[r.Run, str, str] | None:
            row = await sql_runs.by_message(connection, organ_id, message_id)
            if row is None:
                return None
            return await sql_runs.run_of(connection, row), row["input_hash"], row["user_id"]

        return await self._do.read(work)

    async def closing_events(self, organ_id: str, run_id: str) -> tuple[r.TurnEvent, ...]:
        row = await self._do.read(lambda connection: sql_runs.by_id(connection, organ_id, run_id))
        return sql_runs.closing_events_of(row)

    async def previous_turn(self, scope: Scope) -> r.PreviousTurn | None:
        return await self._do.read(lambda connection: sql_runs.previous_turn(connection, scope))

    async def node_dialogue(self, scope: Scope, task_id: str, node_id: str) -> tuple[r.DialogueMessage, ...]:
        return await self._do.read(
            lambda connection: sql_load.node_dialogue(connection, scope, task_id, node_id)
        )

    async def call_requests(self, scope: Scope, evidence_ids: Sequence[str]) -> dict[str, str]:
        return await self._do.read(lambda connection: sql_calls.requests(connection, scope, evidence_ids))

    async def call_payload(self, scope: Scope, task_id: str, evidence_id: str) -> str | None:
        return await self._do.read(
            lambda connection: sql_calls.call_payload(connection, scope, task_id, evidence_id)
        )

    async def payload(self, scope: Scope, payload_id: str) -> str | None:
        return await self._do.read(lambda connection: sql_calls.payload(connection, scope, payload_id))

    async def close(self) -> None:
        for groups in (self._messages, self._registrations, self._settlements):
            await groups.close()
        await self._do.close()


def _scope(turn: r.TurnRef) -> Scope:
    return Scope(turn.organ_id, turn.conversation_id)

"""The sweeper: for conversations nobody comes back to, what the next begin would have done; and retention.

Its work is found in SQL. It takes a conversation's lock and fence as a turn does, and skips a busy one, so
any number of replicas may sweep at once. A prepared turn is finished with its recorded end (PENDING becomes
PERSISTED); every other RUNNING run below its version becomes FAILED / INTERRUPTED.
"""

from __future__ import annotations

import secrets

import msgspec
import structlog

from state_service.conversation import erase, persist, recover
from state_service.conversation.begin import ATTEMPTS
from state_service.conversation.stores import Stores
from state_service.ports import (
    Acquired,
    Acquisition,
    Claim,
    ClaimKind,
    Code,
    Forgotten,
    Phase,
    RunStart,
    StoreCorrupt,
    StoreUnavailable,
)
from turnfence import records as r
from turnfence.errors import TurnfenceError

log = structlog.get_logger(__name__)


class Retention(msgspec.Struct, frozen=True):
    """How long things are kept, in milliseconds; None: for ever."""

    conversations_ms: int | None = None  # since the last turn
    payloads_ms: int | None = None  # since they were written
    traces_ms: int | None = None


class Swept(msgspec.Struct):
    """What one sweep did."""

    recovered: int = 0  # conversations brought in order
    busy: int = 0  # skipped: a turn is alive
    failed: int = 0  # left to the next sweep, and logged
    erased: int = 0  # conversations
    payloads: int = 0  # rows that retention dropped
    traces: int = 0


async def sweep(stores: Stores, retention: Retention, *, batch: int) -> Swept:
    """One pass, at most ``batch`` conversations or rows of each kind. Raises ``StoreUnavailable`` when SQL
    cannot be asked for work."""
    swept = Swept()
    now = stores.clock.now_ms()
    for found in await stores.upkeep.unfinished(now - stores.rules.lease_ms, batch):
        await _one(stores, found, swept)
    for scope, version in await stores.upkeep.half_erased(batch):
        await erase.erase(stores, scope, version)
        swept.erased += 1
    if retention.conversations_ms is not None:
        for found in await stores.upkeep.aged(now - retention.conversations_ms, batch):
            await _forget(stores, found, now, swept)
    if retention.payloads_ms is not None:
        swept.payloads = await stores.upkeep.drop_payloads(now - retention.payloads_ms, batch)
    if retention.traces_ms is not None:
        swept.traces = await stores.upkeep.drop_traces(now - retention.traces_ms, batch)
    return swept


async def _one(stores: Stores, found: Forgotten, swept: Swept) -> None:
    """One conversation; what goes wrong with it must not keep the others waiting."""
    try:
        if await recover_conversation(stores, found):
            swept.recovered += 1
        else:
            swept.busy += 1
    except (StoreUnavailable, StoreCorrupt, TurnfenceError) as error:
        swept.failed += 1
        log.warning(
            "sweep_failed",
            organ_id=found.scope.organ_id,
            conversation_id=found.scope.conversation_id,
            error_type=type(error).__name__,
            reason=str(getattr(error, "reason", "")),
        )


async def _forget(stores: Stores, found: Forgotten, now: int, swept: Swept) -> None:
    version = await stores.upkeep.bury(found.scope, found.user_id, now)
    if version is not None:
        await erase.erase(stores, found.scope, version)
        swept.erased += 1


async def recover_conversation(stores: Stores, found: Forgotten) -> bool:
    """Take the conversation as a turn does, bring it in order, hand it back. False: somebody else has it."""
    run_id = f"sweep-{secrets.token_hex(16)}"
    acquired = await _acquire(stores, found, run_id)
    if acquired is None:
        return False
    turn = r.TurnRef(
        organ_id=found.scope.organ_id,
        conversation_id=found.scope.conversation_id,
        run_id=run_id,
        version=acquired.version,
        lease_token=acquired.token,
    )
    claim = await _claim(stores, found, turn)
    if claim.kind is not ClaimKind.CLAIMED:
        await stores.hot.undo_acquire(turn, previous_run=acquired.previous_run)
        return False
    known = recover.persisted(claim)
    for _ in range(ATTEMPTS):
        recovered = await recover.recover(stores, turn, claim, known)
        known = recovered.known
        applied = await stores.hot.apply(
            turn,
            recovered.ops,
            ttl_ms=stores.rules.ttl_ms,
            now_ms=stores.clock.now_ms(),
            stamp=recovered.view.conversation.stamp,
            base_seq=claim.row.persist_seq if claim.row else 0,
            phase=Phase.BEGIN,
        )
        if applied.code is not Code.GAP:
            break
    if applied.code is not Code.APPLIED:
        return False
    await persist.drain(stores, msgspec.structs.replace(turn, seen_seq=applied.data_seq), closing=True)
    return True


async def _acquire(stores: Stores, found: Forgotten, run_id: str) -> Acquired | None:
    for baseline in (None, found.fence_version):
        acquired = await stores.hot.acquire(
            found.scope,
            run_id=run_id,
            user_id=found.user_id,
            token=secrets.token_hex(16),
            lease_ms=stores.rules.lease_ms,
            ttl_ms=stores.rules.ttl_ms,
            now_ms=stores.clock.now_ms(),
            baseline=baseline,
        )
        if acquired.kind is Acquisition.ACQUIRED:
            return acquired
        if acquired.kind is not Acquisition.UNKNOWN:
            return None
    return None


async def _claim(stores: Stores, found: Forgotten, turn: r.TurnRef) -> Claim:
    """The fence alone: a sweep is no run, and leaves no row of one."""
    now = stores.clock.now_ms()
    start = RunStart(run_id=turn.run_id, message_id="", input_hash="", query="", agent_id="", started_at=now)
    return await stores.cold.claim(
        found.scope, user_id=found.user_id, version=turn.version, start=start, now_ms=now
    )

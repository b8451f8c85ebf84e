"""Flush, and the end of a turn: prepare → commit → close (state document 4 ⑤⑥; wire.md).

A crash in between is finished by whoever comes next with the recorded outcome; only a turn that was
never prepared is INTERRUPTED. When SQL cannot be reached the answer is PENDING: prepared, not yet
committed; the lock is free, the owner stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog

from state_service.conversation.stores import Stores, check_fence, refused, scope_of, written
from state_service.core import drain as drains
from state_service.core import keys, members
from state_service.core.changes import given_up_ops, operations, prepare_ops
from state_service.core.spill import spill
from state_service.ports import (
    Code,
    Commit,
    Op,
    OpName,
    PersistBatch,
    Phase,
    Read,
    RunEnd,
    Scope,
    StoreUnavailable,
)
from turnfence import records as r
from turnfence.axes import CancelReason, Durability, RunState
from turnfence.errors import Reason, TurnfenceError, invalid, too_large

log = structlog.get_logger(__name__)

MAX_OPS = 2000


async def flush(stores: Stores, request: r.FlushRequest) -> r.FlushResponse:
    """All changes or none, under the fence; safe to repeat with the same sequence.

    Raises STATE_FENCED, STATE_LOST, STATE_WRITE_FAILED (size), STATE_UNAVAILABLE.
    """
    for place, change in enumerate(request.changes):
        if isinstance(change, r.CloseTask):
            raise invalid(f"changes[{place}].close_task", "travels in PersistTurn only")
    ops = await _ops(stores, request.turn, request.sequence, request.changes)
    return r.FlushResponse(data_seq=await _apply(stores, request.turn, request.sequence, ops))


async def _ops(stores: Stores, turn: r.TurnRef, sequence: int, changes: Sequence[r.StateChange]) -> list[Op]:
    for place, change in enumerate(changes):
        if isinstance(change, r.PutEdge) and change.edge.from_node_id == change.edge.to_node_id:
            raise invalid(f"changes[{place}].put_edge.edge.to_node_id", "must be another node")
    kept, spilled = spill(changes, stores.rules.space_field_max_bytes, turn.run_id, sequence)
    for payload in spilled:
        if not await stores.cold.put_payload(
            turn, payload_id=payload.payload_id, payload_type="OUTPUT", data=payload.data
        ):
            raise TurnfenceError(Reason.STATE_FENCED)
    return operations(turn, sequence, kept, stores.rules.limits)


async def _apply(stores: Stores, turn: r.TurnRef, sequence: int, ops: Sequence[Op]) -> int:
    size = sum(len(op.value.encode()) for op in ops)
    if size > stores.rules.flush_max_bytes:
        raise too_large("state.flush-max-bytes", size, stores.rules.flush_max_bytes)
    if len(ops) > MAX_OPS:
        raise too_large("flush operations", len(ops), MAX_OPS)
    return written(
        await stores.hot.apply(
            turn,
            ops,
            ttl_ms=stores.rules.ttl_ms,
            now_ms=stores.clock.now_ms(),
            sequence=sequence,
        )
    )


async def persist_turn(stores: Stores, request: r.PersistTurnRequest) -> r.PersistTurnResponse:
    """End a turn. A repeat after a lost answer finds the ``turn_commit`` row and says so.

    Raises STATE_FENCED and STATE_LOST (the turn did not end as it says here), STATE_UNAVAILABLE (nothing
    was prepared), STATE_WRITE_FAILED.
    """
    turn = request.turn
    outcome = _ended(request.outcome, turn.run_id, turn.conversation_id)
    outcome = msgspec.structs.replace(outcome, version=turn.version)
    ops = await _ops(stores, turn, request.sequence, request.changes)
    ops += prepare_ops(turn, outcome, request.closing_events)
    try:
        data_seq = await _apply(stores, turn, request.sequence, ops)
        return await _finish(stores, msgspec.structs.replace(turn, seen_seq=data_seq))
    except TurnfenceError as error:
        if error.reason not in (Reason.STATE_FENCED, Reason.STATE_LOST):
            raise
        ended = await _ended_already(stores, turn)
        if ended is None:
            raise
        return ended


async def _ended_already(stores: Stores, turn: r.TurnRef) -> r.PersistTurnResponse | None:
    """A turn that is barred by its own end: it ended by an earlier try of the same call, or a successor has
    the fence and will bring the prepared end to SQL. The outbox is asked first: a member that is gone from
    it is in SQL, or was lost with Redis."""
    member = members.commit(turn.run_id)
    (prepared,) = await stores.hot.read(scope_of(turn), [Read("HGET", keys.OUTBOX, (member,))])
    try:
        committed = await stores.cold.committed(turn.organ_id, turn.run_id)
    except StoreUnavailable:
        if not prepared:
            raise
        committed = False
    if committed:
        return r.PersistTurnResponse(durability=Durability.PERSISTED, already_persisted=True)
    return r.PersistTurnResponse(durability=Durability.PENDING) if prepared else None


async def _finish(stores: Stores, turn: r.TurnRef) -> r.PersistTurnResponse:
    """Commit and close what is prepared."""
    try:
        done = await drain(stores, turn, closing=True, prepared=True)
    except StoreUnavailable:
        return await _pending(stores, turn, turn.seen_seq)
    return r.PersistTurnResponse(
        durability=Durability.PERSISTED, closed=list(done.records), data_seq=turn.seen_seq
    )


def _ended(outcome: r.Run, run_id: str, conversation_id: str) -> r.Run:
    """The outcome as this run's: an end, and of no other run."""
    if outcome.run_state in (None, RunState.RUNNING):
        raise invalid("outcome.run_state", "must be how the run ended")
    if outcome.run_id != run_id:
        raise invalid("outcome.run_id", "must be the run that ends")
    return msgspec.structs.replace(outcome, conversation_id=conversation_id)


async def _pending(stores: Stores, turn: r.TurnRef, data_seq: int) -> r.PersistTurnResponse:
    """Prepared, not committed. The lock is freed as far as Redis answers; else its lease ends it."""
    try:
        await stores.hot.apply(
            turn, [Op(OpName.UNLOCK)], ttl_ms=stores.rules.ttl_ms, now_ms=stores.clock.now_ms()
        )
    except StoreUnavailable as error:
        log.warning("lock_left_to_its_lease", run_id=turn.run_id, organ_id=turn.organ_id, error=str(error))
    return r.PersistTurnResponse(durability=Durability.PENDING, data_seq=data_seq)


class Done(msgspec.Struct, frozen=True):
    pending: drains.Pending
    batch: PersistBatch
    records: tuple[r.TaskRecord, ...]


async def drain(stores: Stores, turn: r.TurnRef, *, closing: bool = False, prepared: bool = False) -> Done:
    """Read what is dirty, commit it, clean up after. ``closing``: also clear the owner and free the lock.
    ``prepared``: what is dirty holds the turn's own end. Raises ``StoreUnavailable`` when nothing was
    committed."""
    scope = scope_of(turn)
    pending = drains.pending(await stores.hot.read(scope, drains.PENDING_READS))
    check_fence(pending.state, turn)
    if prepared and members.commit(turn.run_id) not in pending.outbox:
        raise refused(Code.LOST)  # nobody but its own close takes it away: Redis went back
    seen = msgspec.structs.replace(turn, seen_seq=pending.data_seq)
    plan = drains.plan(pending)
    state, *raw = await stores.hot.read(scope, [Read("HGETALL", keys.STATE), *drains.value_reads(plan)])
    check_fence(state, seen)  # values that are older than what names them would be lost when it is cleaned
    values = drains.values(plan, raw)
    batch = drains.batch(pending, plan, values)
    await _commit(stores, turn, batch)
    rules = stores.rules
    ops = drains.close_ops(pending, values, batch.run_ends, rules.limits, rules.expiries)
    if closing:
        await _close(stores, seen, [*ops, *drains.finish_ops()])
    else:
        await _close(stores, seen, ops, phase=Phase.RECOVERY, stamp=pending.stamp)
    return Done(pending=pending, batch=batch, records=tuple(batch.records.values()))


async def _commit(stores: Stores, turn: r.TurnRef, batch: PersistBatch) -> None:
    """One transaction, idempotent: when its outcome is unknown it is tried once more (D24). Another turn's
    ``turn_commit`` row in the batch says nothing about the batch: an earlier drain may have written it."""
    try:
        done = await stores.cold.persist(turn, batch, now_ms=stores.clock.now_ms())
    except StoreUnavailable:
        done = await stores.cold.persist(turn, batch, now_ms=stores.clock.now_ms())
    if done is Commit.OLDER:
        raise refused(Code.LOST)
    if done is not Commit.DONE:
        raise refused(Code.FENCED)


async def _close(
    stores: Stores,
    turn: r.TurnRef,
    ops: Sequence[Op],
    *,
    phase: Phase = Phase.TURN,
    stamp: tuple[int, int] | None = None,
) -> None:
    """Harmless when it fails: the dirty marks stay, and the next begin does it again (D27)."""
    try:
        applied = await stores.hot.apply(
            turn,
            ops,
            ttl_ms=stores.rules.ttl_ms,
            now_ms=stores.clock.now_ms(),
            phase=phase,
            stamp=stamp,
        )
    except StoreUnavailable as error:
        log.warning("close_left_to_next_begin", run_id=turn.run_id, organ_id=turn.organ_id, error=str(error))
        return
    if applied.code is not Code.APPLIED:
        log.warning(
            "close_left_to_next_begin", run_id=turn.run_id, organ_id=turn.organ_id, code=applied.code.name
        )


async def renew_lease(stores: Stores, request: r.RenewLeaseRequest) -> r.RenewLeaseResponse:
    """Compare-and-extend; raises STATE_FENCED when somebody else holds the conversation."""
    lease = await stores.hot.extend_lease(request.turn, lease_ms=stores.rules.lease_ms)
    if not lease.held:
        raise TurnfenceError(Reason.STATE_FENCED)
    return r.RenewLeaseResponse(
        lease_until=stores.clock.now_ms() + stores.rules.lease_ms,
        cancel=CancelReason(lease.cancel) if lease.cancel else None,
    )


async def abandon_turn(stores: Stores, request: r.AbandonTurnRequest) -> r.AbandonTurnResponse:
    """Give a turn up: its end is recorded, its lock freed; the next turn recovers what it flushed.
    Safe to repeat; a run that has ended keeps its end."""
    scope = Scope(request.organ_id, request.conversation_id)
    outcome = _ended(request.outcome, request.run_id, request.conversation_id)
    ops = given_up_ops(request.run_id, outcome, request.closing_events)
    released = await stores.hot.abandon(
        scope,
        request.run_id,
        ops,
        ttl_ms=stores.rules.ttl_ms,
        now_ms=stores.clock.now_ms(),
    )
    end = RunEnd(run=outcome, closing_events=tuple(request.closing_events), prepared=False)
    await stores.cold.give_up(scope, end)
    return r.AbandonTurnResponse(released=released)

"""BeginTurn (reliability.md 3.1, B0–B6): owner → lock and renew → claim → recover → S1.

The order is the promise: the stale check comes after the claim (D4), the load after both, and the
user's message goes to Redis before SQL. Nothing is written before the owner is known to be right.
"""

from __future__ import annotations

import secrets

import msgspec

from state_service.conversation import recover, runs
from state_service.conversation.stores import Stores, refused
from state_service.core.changes import message_ops
from state_service.core.text import cut
from state_service.ports import (
    Acquired,
    Acquisition,
    Claim,
    ClaimKind,
    Code,
    Phase,
    RunStart,
    Scope,
    StoreUnavailable,
)
from turnfence import records as r
from turnfence.axes import CheckpointType, DialogueRole, MessageType, RunState
from turnfence.errors import Reason, TurnfenceError

ATTEMPTS = 4  # acquire again when SQL's fence is ahead; load again when the stamp moved


async def begin_turn(stores: Stores, request: r.BeginTurnRequest) -> r.BeginTurnResponse:
    """Begin a turn, or answer ``existing_run`` for a message that is known already.

    Raises CONVERSATION_BUSY, CONVERSATION_FORBIDDEN, CONVERSATION_DELETED, MESSAGE_ID_REUSED,
    STATE_UNAVAILABLE. Safe to repeat with the same run id.
    """
    scope = Scope(request.organ_id, request.conversation_id)
    text, truncated = cut(request.input.text, stores.rules.message_max_bytes)
    started = await _acquire_and_claim(stores, scope, request, text)
    if isinstance(started, r.Run):
        return r.BeginTurnResponse(existing_run=started)
    acquired, claim = started
    turn = r.TurnRef(
        organ_id=scope.organ_id,
        conversation_id=scope.conversation_id,
        run_id=request.run_id,
        version=acquired.version,
        lease_token=acquired.token,
    )
    known = recover.persisted(claim)
    for _ in range(ATTEMPTS):
        recovered = await recover.recover(stores, turn, claim, known)
        known = recovered.known
        message = _stored_message(request, recovered)
        ops = [*recovered.ops]
        if message is None:
            message = _user_message(request, turn, text, recovered.view, stores.clock.now_ms())
            ops += message_ops(message, stores.rules.limits) if message is not None else []
        applied = await stores.hot.apply(
            turn,
            ops,
            ttl_ms=stores.rules.ttl_ms,
            now_ms=stores.clock.now_ms(),
            stamp=recovered.view.conversation.stamp,
            base_seq=claim.row.persist_seq if claim.row else 0,
            phase=Phase.BEGIN,
        )
        if applied.code is not Code.GAP:
            break
    if applied.code is not Code.APPLIED:
        raise refused(applied.code)
    turn = msgspec.structs.replace(turn, seen_seq=applied.data_seq)
    if message is not None and not await stores.cold.insert_message(turn, message):
        raise TurnfenceError(Reason.STATE_FENCED)
    return r.BeginTurnResponse(
        turn=turn,
        snapshot=await _snapshot(stores, turn, recovered, message),
        user_message=message,
        truncated=truncated,
        recovery=recovered.recovery,
        previous_turn=await stores.cold.previous_turn(scope),
    )


async def _snapshot(
    stores: Stores, turn: r.TurnRef, recovered: recover.Recovered, message: r.DialogueMessage | None
) -> r.Snapshot:
    snapshot = recover.snapshot(turn, recovered, message, stores.rules.limits.dialogue_max)
    ids = [head.evidence_id for head in snapshot.unresolved_writes]
    if not ids:
        return snapshot
    requests = await stores.cold.call_requests(Scope(turn.organ_id, turn.conversation_id), ids)
    return msgspec.structs.replace(snapshot, unresolved_requests=requests)


async def _acquire_and_claim(
    stores: Stores, scope: Scope, request: r.BeginTurnRequest, text: str
) -> tuple[Acquired, Claim] | r.Run:
    """B0–B2. The lock alone promises nothing; the claim makes the version count in both stores."""
    token = secrets.token_hex(16)
    baseline: int | None = None
    for _ in range(ATTEMPTS):
        acquired = await stores.hot.acquire(
            scope,
            run_id=request.run_id,
            user_id=request.user_id,
            token=token,
            lease_ms=request.lease or stores.rules.lease_ms,
            ttl_ms=stores.rules.ttl_ms,
            now_ms=stores.clock.now_ms(),
            baseline=baseline,
        )
        if acquired.kind is Acquisition.UNKNOWN:
            baseline = await _baseline(stores, scope, request)
            continue
        if acquired.kind is Acquisition.BUSY:
            return await _known_or_busy(stores, request, acquired)
        if acquired.kind is not Acquisition.ACQUIRED:
            raise _refusal(acquired.kind)
        claim = await _claim(stores, scope, request, acquired, text)
        if claim.kind is ClaimKind.CLAIMED:
            return acquired, claim
        if claim.kind is ClaimKind.BEHIND:
            baseline = claim.fence_version
            continue
        await stores.hot.undo_acquire(_ref(scope, request, acquired), previous_run=acquired.previous_run)
        if claim.kind is ClaimKind.KNOWN_MESSAGE and claim.existing is not None:
            return await _same_message(stores, claim.existing, claim.existing_hash, request)
        raise _refusal(claim.kind)
    raise TurnfenceError(Reason.CONVERSATION_BUSY, detail="the fence kept moving")


async def _baseline(stores: Stores, scope: Scope, request: r.BeginTurnRequest) -> int:
    """SQL is read first only when Redis does not know the conversation. The version that this very run has
    claimed there, by a begin that is repeated, has not been overtaken."""
    row = await stores.cold.conversation(scope)
    if row is None:
        return 0
    if row.deleted:
        raise TurnfenceError(Reason.CONVERSATION_DELETED)
    if row.user_id != request.user_id:
        raise TurnfenceError(Reason.CONVERSATION_FORBIDDEN)
    own = row.fence_trace == request.run_id
    return max(row.fence_version - own, row.state_version)


async def _claim(
    stores: Stores, scope: Scope, request: r.BeginTurnRequest, acquired: Acquired, text: str
) -> Claim:
    start = RunStart(
        run_id=request.run_id,
        message_id=request.input.message_id,
        input_hash=request.input_hash,
        query=text,
        agent_id=request.agent_id,
        started_at=stores.clock.now_ms(),
    )
    try:
        return await stores.cold.claim(
            scope,
            user_id=request.user_id,
            version=acquired.version,
            start=start,
            now_ms=stores.clock.now_ms(),
        )
    except StoreUnavailable:
        # The claim may have happened; the next begin finds this run RUNNING and ends it.
        await stores.hot.undo_acquire(_ref(scope, request, acquired), previous_run=acquired.previous_run)
        raise


def _ref(scope: Scope, request: r.BeginTurnRequest, acquired: Acquired) -> r.TurnRef:
    return r.TurnRef(
        organ_id=scope.organ_id,
        conversation_id=scope.conversation_id,
        run_id=request.run_id,
        version=acquired.version,
        lease_token=acquired.token,
    )


async def _known_or_busy(stores: Stores, request: r.BeginTurnRequest, acquired: Acquired) -> r.Run:
    """A busy conversation: the caller may be repeating the very message that is running."""
    known = await stores.cold.run_by_message(request.organ_id, request.input.message_id)
    if known is not None:
        run, input_hash, user_id = known
        if user_id != request.user_id:
            raise TurnfenceError(Reason.MESSAGE_ID_REUSED)
        own = run.run_id == request.run_id and run.run_state is RunState.RUNNING
        if not own:  # else a repeat of this begin, and Redis has gone back to an older holder
            return await _same_message(stores, run, input_hash, request)
    raise TurnfenceError(
        Reason.CONVERSATION_BUSY, retry_after=max(0.1, min(acquired.busy_for_ms / 1000, 1.0))
    )


async def _same_message(stores: Stores, run: r.Run, input_hash: str, request: r.BeginTurnRequest) -> r.Run:
    """The run of a message that is known, as far as it has come: one that is prepared has ended, whatever
    SQL says yet."""
    if input_hash != request.input_hash:
        raise TurnfenceError(Reason.MESSAGE_ID_REUSED)
    if run.run_state is not RunState.RUNNING:
        return run
    return await runs.live_run(stores, Scope(request.organ_id, run.conversation_id), run)


_REFUSALS = {
    Acquisition.FORBIDDEN: Reason.CONVERSATION_FORBIDDEN,
    Acquisition.DELETED: Reason.CONVERSATION_DELETED,
    ClaimKind.FORBIDDEN: Reason.CONVERSATION_FORBIDDEN,
    ClaimKind.DELETED: Reason.CONVERSATION_DELETED,
    ClaimKind.KNOWN_MESSAGE: Reason.MESSAGE_ID_REUSED,
}


def _refusal(kind: Acquisition | ClaimKind) -> TurnfenceError:
    return TurnfenceError(_REFUSALS[kind])


# --- S1 -------------------------------------------------------------------------------------------


def _stored_message(request: r.BeginTurnRequest, recovered: recover.Recovered) -> r.DialogueMessage | None:
    """The message, when an earlier try of this very begin has stored it: a repeat answers the same."""
    messages = (*recovered.view.conversation.dialogue, *recovered.messages)
    return next((m for m in messages if m.message_id == request.input.message_id), None)


def _user_message(
    request: r.BeginTurnRequest, turn: r.TurnRef, text: str, view: recover.View, now_ms: int
) -> r.DialogueMessage | None:
    """The user's message; an answer to a question carries the asking node, and the round that it begins
    (2.9): a round reads from the user's words to what the calls returned (3.3)."""
    if not text:
        return None
    task = view.task
    checkpoint = task.checkpoint if task is not None else None
    asked = checkpoint is not None and checkpoint.type is CheckpointType.FOLLOW_UP
    node_id = checkpoint.node_id if asked and checkpoint is not None else ""
    return r.DialogueMessage(
        message_id=request.input.message_id,
        role=DialogueRole.USER,
        type=MessageType.USER_TEXT,
        text=text,
        trace_id=turn.run_id,
        task_id=task.metadata.task_id if asked and task is not None else "",
        node_id=node_id,
        round=view.rounds.get(node_id, 0) + 1 if asked else 0,
        created_at=now_ms,
        version=turn.version,
        idx=0,
    )

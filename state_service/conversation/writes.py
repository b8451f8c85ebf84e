"""S2 and S3 (state document 5.4): a write is registered in both stores before it is called, and
settled whatever became of the run.

Redis first, SQL second, and only when both have it may the harness call the tool. The head settles
first and alone; payloads go apart.
"""

from __future__ import annotations

import hashlib

import msgspec
import structlog

from state_service.conversation.stores import Stores, check_fence, refused, scope_of, written
from state_service.core import hot, keys
from state_service.core.changes import UNRESOLVED, consume_ops, dirty, evidence_ops, settlement_ops
from state_service.core.members import evidence as evidence_member
from state_service.ports import (
    S2,
    Code,
    ColdCall,
    Found,
    Op,
    Read,
    S2Result,
    StoreUnavailable,
)
from turnfence import records as r
from turnfence.axes import (
    CallStatus,
    FailureKind,
    SideEffect,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
    WriteDecision,
)
from turnfence.errors import Reason, TurnfenceError, invalid

log = structlog.get_logger(__name__)

ATTEMPTS = 16  # settle again when another write of the turn came in between
APPROVAL_TOLERANCE_MS = 60_000  # the caller, by its own clock, found it open just now (D55)


async def register_write(stores: Stores, request: r.RegisterWriteRequest) -> r.RegisterWriteResponse:
    """S2: PROCEED (call the tool now), REUSED (it was done), BLOCKED (its outcome is not known).

    Safe to repeat with the same evidence id. Raises STATE_FENCED, STATE_LOST, and STATE_UNAVAILABLE
    when SQL could not finish: STARTED stays, and only the harness, which knows that it made no call,
    may settle it UNKNOWN_PRE_CALL.
    """
    head = request.evidence
    _check_registration(request)
    await _check_approval(stores, request)
    field = keys.write_field(head.tool_name, head.idempotency_key)
    registered = await stores.hot.register_write(
        request.turn,
        head=head,
        index_field=field,
        ops=_registration_ops(request),
        ttl_ms=stores.rules.ttl_ms,
        now_ms=stores.clock.now_ms(),
    )
    if registered.found is not None:
        return await _answer_found(stores, request, registered.found, registered.data_seq)
    if registered.code not in (Code.APPLIED, Code.ALREADY):
        raise refused(registered.code)
    cold = await _register_cold(stores, request)
    if cold.kind is S2.FENCED:
        raise TurnfenceError(Reason.STATE_FENCED)
    if cold.kind is S2.DUPLICATE:
        return await _undo(stores, request, cold.head)
    if cold.kind is S2.MINE and cold.head is not None and cold.head.status is not CallStatus.STARTED:
        return _decision(cold.head, request.turn, registered.data_seq, stores.clock.now_ms())
    return r.RegisterWriteResponse(
        decision=WriteDecision.PROCEED, evidence=head, data_seq=registered.data_seq
    )


def _check_registration(request: r.RegisterWriteRequest) -> None:
    head = request.evidence
    if head.status is not CallStatus.STARTED:
        raise invalid("evidence.status", "must be STARTED")
    if head.side_effect is not SideEffect.WRITE:
        raise invalid("evidence.side_effect", "must be WRITE")
    if not head.idempotency_key:
        raise invalid("evidence.idempotency_key", "is required")
    if head.trace_id != request.turn.run_id:
        raise invalid("evidence.trace_id", "must be the turn's run")
    _check_place(head, request.task_id, request.node_id, "evidence")


def _check_place(head: r.EvidenceHead, task_id: str, node_id: str, path: str) -> None:
    if head.task_id != task_id:
        raise invalid(f"{path}.task_id", "must be the task that it is sent with")
    if head.node_id != node_id:
        raise invalid(f"{path}.node_id", "must be the node that it is sent with")


async def _check_approval(stores: Stores, request: r.RegisterWriteRequest) -> None:
    """The approval that is used up is open, is for this very write, and has not expired (D52, D55). Only this
    turn can change it meanwhile. A repeat finds its evidence registered, and the approval gone."""
    consume, head = request.consume_checkpoint, request.evidence
    if consume is None:
        return
    state, text, registered = await stores.hot.read(
        scope_of(request.turn),
        [
            Read("HGETALL", keys.STATE),
            Read("GET", keys.checkpoint(consume.task_id)),
            Read("HGET", keys.evidence(head.task_id, head.node_id), (head.evidence_id,)),
        ],
    )
    check_fence(state, request.turn)
    if registered:
        return
    checkpoint = hot.decode(text, r.TaskCheckpoint) if text else None
    if checkpoint is None or checkpoint.checkpoint_id != consume.checkpoint_id:
        raise TurnfenceError(Reason.ARGS_HASH_MISMATCH, detail="the approval is not open")
    pending = checkpoint.pending_action
    if pending is None or (pending.tool_name, pending.args_hash) != (head.tool_name, head.args_hash):
        raise TurnfenceError(Reason.ARGS_HASH_MISMATCH)
    if stores.clock.now_ms() > (checkpoint.expires_at or stores.clock.now_ms()) + APPROVAL_TOLERANCE_MS:
        raise TurnfenceError(Reason.APPROVAL_EXPIRED)


async def _register_cold(stores: Stores, request: r.RegisterWriteRequest) -> S2Result:
    """S2, the SQL half. A write that bars it there but is settled in Redis is brought to SQL first: the
    settled state wins, whichever side has it."""
    turn, head = request.turn, request.evidence
    registered = await stores.cold.register_call(turn, head, request.request_json)
    found = registered.head
    if registered.kind is not S2.DUPLICATE or found is None:
        return registered
    (text,) = await stores.hot.read(
        scope_of(turn), [Read("HGET", keys.evidence(found.task_id, found.node_id), (found.evidence_id,))]
    )
    known = hot.decode(text, r.EvidenceHead) if text else found
    if found.status not in UNRESOLVED or known.status in UNRESOLVED:
        return registered
    if not await stores.cold.settle_calls(turn, [ColdCall(head=known, request_json="", payload_json="")]):
        return S2Result(S2.FENCED)
    return await stores.cold.register_call(turn, head, request.request_json)


def _registration_ops(request: r.RegisterWriteRequest) -> list[Op]:
    """What happens in the same atomic step: the mark for SQL, and the approval's consumption."""
    head = request.evidence
    ops = [dirty(evidence_member(head.task_id, head.node_id, head.evidence_id))]
    if request.consume_checkpoint is not None:
        ops += consume_ops(request.consume_checkpoint)
    return ops


async def _answer_found(
    stores: Stores, request: r.RegisterWriteRequest, found: Found, data_seq: int
) -> r.RegisterWriteResponse:
    scope = scope_of(request.turn)
    node_id = found.node_id or request.node_id
    (text,) = await stores.hot.read(
        scope, [Read("HGET", keys.evidence(found.task_id, node_id), (found.entry.evidence_id,))]
    )
    head = hot.decode(text, r.EvidenceHead) if text else _stub(request, found)
    return _decision(head, request.turn, data_seq, stores.clock.now_ms())


def _stub(request: r.RegisterWriteRequest, found: Found) -> r.EvidenceHead:
    """The index knows more than the head's hash does: answer by the index alone."""
    return msgspec.structs.replace(
        request.evidence,
        evidence_id=found.entry.evidence_id,
        task_id=found.task_id,
        node_id=found.node_id,
        status=found.entry.status,
        business_ok=found.entry.business_ok,
        not_before=found.entry.not_before,
        trace_id="",
    )


def _decision(head: r.EvidenceHead, turn: r.TurnRef, data_seq: int, now_ms: int) -> r.RegisterWriteResponse:
    """The table of state document 5.4 for a write that was found."""
    if head.status is CallStatus.SUCCESS and head.business_ok:
        return r.RegisterWriteResponse(decision=WriteDecision.REUSED, evidence=head, data_seq=data_seq)
    in_flight = head.status is CallStatus.STARTED or (head.not_before or 0) > now_ms
    return r.RegisterWriteResponse(
        decision=WriteDecision.BLOCKED,
        evidence=head,
        code=(Reason.WRITE_IN_FLIGHT if in_flight else Reason.WRITE_PENDING_VERIFY).value,
        data_seq=data_seq,
    )


async def _undo(
    stores: Stores, request: r.RegisterWriteRequest, found: r.EvidenceHead | None
) -> r.RegisterWriteResponse:
    """SQL knows of a write that Redis did not: ours was never registered, the found one counts."""
    ours = msgspec.structs.replace(
        request.evidence, status=CallStatus.CANCELLED, failure_kind=FailureKind.NONE
    )
    ops = evidence_ops(ours)
    if found is not None:
        ops += evidence_ops(found)
    data_seq = written(
        await stores.hot.apply(request.turn, ops, ttl_ms=stores.rules.ttl_ms, now_ms=stores.clock.now_ms())
    )
    head = found if found is not None else ours
    return _decision(head, request.turn, data_seq, stores.clock.now_ms())


# --- S3 -------------------------------------------------------------------------------------------


async def settle_calls(stores: Stores, request: r.SettleCallsRequest) -> r.SettleCallsResponse:
    """S3, and the evidence of read tools: heads as given, payloads where their size puts them.

    Safe to repeat. A settlement whose fence has moved leaves a trace event and is refused with
    STATE_FENCED: the evidence stays UNKNOWN for VERIFY. When Redis has it and SQL does not answer,
    the dirty marks bring it to SQL later.
    """
    for place, asked in enumerate(request.settlements):
        path = f"settlements[{place}].evidence"
        if asked.evidence.status is CallStatus.STARTED:
            raise invalid(f"{path}.status", "must be an outcome")
        _check_place(asked.evidence, asked.task_id, asked.node_id, path)
    settlements = [_placed(stores, settlement) for settlement in request.settlements]
    try:
        settlements, data_seq = await _settle_hot(stores, request.turn, settlements)
        calls = [
            ColdCall(head=s.evidence, request_json=s.request_json, payload_json=s.payload_json)
            for s in settlements
        ]
        if not await stores.cold.settle_calls(request.turn, calls):
            raise TurnfenceError(Reason.STATE_FENCED)
    except TurnfenceError as error:
        if error.reason is Reason.STATE_FENCED:
            await _note_late(stores, request)
        raise
    return r.SettleCallsResponse(evidence=[s.evidence for s in settlements], data_seq=data_seq)


async def _settle_hot(
    stores: Stores, turn: r.TurnRef, settlements: list[r.Settlement]
) -> tuple[list[r.Settlement], int]:
    """The settlements that count, in Redis, and the data sequence. What is settled stays settled: a late one
    that says something else must not open a write again, or bar it, or give it another answer."""
    reads = [Read("HGETALL", keys.STATE)]
    reads += [
        Read("HGET", keys.evidence(s.task_id, s.node_id), (s.evidence.evidence_id,)) for s in settlements
    ]
    for _ in range(ATTEMPTS):
        state, *texts = await stores.hot.read(scope_of(turn), reads)
        check_fence(state, turn)
        known = [hot.decode(text, r.EvidenceHead) if text else None for text in texts]
        counting = [_first(new, old) for new, old in zip(settlements, known, strict=True)]
        ops: list[Op] = []
        for settlement, old in zip(counting, known, strict=True):
            if old is None or old.status in UNRESOLVED:
                size = len(settlement.payload_json.encode())
                in_redis = size <= stores.rules.payload_redis_max_bytes
                ops += settlement_ops(settlement, payload_in_redis=in_redis)
        stamp = int(state.get("dataVersion") or 0), int(state.get("dataSeq") or 0)
        if not ops:
            return counting, stamp[1]
        applied = await stores.hot.apply(
            turn, ops, ttl_ms=stores.rules.ttl_ms, now_ms=stores.clock.now_ms(), stamp=stamp
        )
        if applied.code is not Code.GAP:
            return counting, written(applied)
    raise StoreUnavailable("the conversation's data kept moving")


def _first(new: r.Settlement, old: r.EvidenceHead | None) -> r.Settlement:
    """The new settlement, or the old one if there is one. Then only a payload that Redis does not hold is
    given to SQL once more: the first try may have died before."""
    if old is None or old.status in UNRESOLVED:
        return new
    again = old.payload_id and old == new.evidence
    return msgspec.structs.replace(new, evidence=old, payload_json=new.payload_json if again else "")


def _placed(stores: Stores, settlement: r.Settlement) -> r.Settlement:
    """Where the payload goes: inline, a table of its own by pointer, or nowhere if it is too large,
    which is the evidence's failure and never the turn's."""
    rules = stores.rules
    head = settlement.evidence
    size = len(settlement.payload_json.encode())
    if size > rules.payload_max_bytes:
        failed = msgspec.structs.replace(
            head,
            status=CallStatus.SUCCESS if head.side_effect is SideEffect.WRITE else CallStatus.FAILED,
            failure_kind=FailureKind.BUSINESS_FAILURE
            if head.side_effect is SideEffect.NONE
            else head.failure_kind,
            error_code=Reason.STATE_WRITE_FAILED.value,
            detail=f"The result has {size} bytes; at most {rules.payload_max_bytes} are kept.",
            payload_bytes=size,
        )
        return msgspec.structs.replace(settlement, evidence=failed, payload_json="")
    if size > rules.payload_inline_max_bytes or size > rules.payload_redis_max_bytes:
        payload_id = hashlib.sha256(f"payload:{head.evidence_id}".encode()).hexdigest()[:32]
        pointed = msgspec.structs.replace(head, payload_id=payload_id, payload_bytes=size)
        return msgspec.structs.replace(settlement, evidence=pointed)
    return msgspec.structs.replace(settlement, evidence=msgspec.structs.replace(head, payload_bytes=size))


async def _note_late(stores: Stores, request: r.SettleCallsRequest) -> None:
    """The one thing a fenced turn may still write: a note about its own end."""
    now = stores.clock.now_ms()
    for place, settlement in enumerate(request.settlements):
        head = settlement.evidence
        trace = r.TraceEvent(
            sequence=1_000_000 + now % 1_000_000_000 + place,
            type=TraceEventType.WRITE_SETTLED_LATE,
            phase=TracePhase.TOOL,
            status=TraceEventStatus.REJECTED,
            started_at=now,
            node_id=head.node_id,
            evidence_id=head.evidence_id,
            attributes={"call_status": head.status.value, "tool_name": head.tool_name},
        )
        try:
            await stores.cold.append_late_trace(scope_of(request.turn), request.turn.run_id, trace)
        except StoreUnavailable as error:
            log.warning(
                "late_settlement_not_noted",
                run_id=request.turn.run_id,
                organ_id=request.turn.organ_id,
                evidence_id=head.evidence_id,
                error=str(error),
            )

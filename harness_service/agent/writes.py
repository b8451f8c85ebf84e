"""Write tools: approval → S2 → the call with its key → S3; and what becomes of an unknown outcome
(state document 5.4, 5.5; D35–D48). Once a write has started it is always settled."""

from __future__ import annotations

import asyncio

import msgspec

from harness_service.agent.node_run import NodeRun, Observed, observed_of
from harness_service.agent.reads import announce, record_settled, settled_by, started_head
from harness_service.core import arguments, checkpoint, invocation
from harness_service.core.arguments import PreparedCall
from harness_service.core.canonical import canonical
from harness_service.core.catalogue import ToolContract
from harness_service.core.invocation import WriteVerdict
from harness_service.core.replies import Reply, say
from harness_service.core.run import RunAborted
from harness_service.ports import ToolOutcome
from harness_service.scope import TurnScope
from turnfence import records as r
from turnfence.axes import (
    CallStatus,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
    WriteDecision,
)
from turnfence.errors import Reason, TurnfenceError

IN_DOUBT = frozenset({CallStatus.STARTED, CallStatus.UNKNOWN, CallStatus.UNKNOWN_PRE_CALL})


async def request_write(
    run: NodeRun, tool: ToolContract, call: PreparedCall, call_id: str
) -> Observed | r.TaskCheckpoint:
    """The model asks for a write: answered from what is known, suspended for an approval, or run."""
    known = _known_write(run, tool, call)
    if known is not None:
        return await known_outcome(run, tool, known, call_id)
    if _needs_approval(run.scope, tool):
        return _approval(run, tool, call)
    run.scope.trace(
        TraceEventType.APPROVAL_BYPASSED,
        TracePhase.TOOL,
        node_id=run.node.node_id,
        tool_name=tool.name,
        by="contract" if not tool.confirm else "state.write-confirm-bypass-tools",
    )
    return await execute_write(run, tool, call, call_id, consume=None)


def _needs_approval(scope: TurnScope, tool: ToolContract) -> bool:
    return tool.confirm and tool.name not in scope.deps.settings.state.write_confirm_bypass_tools


def _approval(run: NodeRun, tool: ToolContract, call: PreparedCall) -> r.TaskCheckpoint:
    scope = run.scope
    return checkpoint.approval(
        checkpoint_id=scope.new_id(),
        node_id=run.node.node_id,
        tool=tool,
        args_json=call.args_json,
        args_hash=call.args_hash,
        now_ms=scope.now(),
        reconfirm_after_ms=round(scope.deps.settings.state.reconfirm_after * 1000),
        locale=scope.request.locale,
    )


def _known_write(run: NodeRun, tool: ToolContract, call: PreparedCall) -> r.WriteIndexEntry | None:
    """The same intent in this task, done or in doubt: nobody is asked to approve it again."""
    assert run.scope.task is not None
    entry = run.scope.task.writes.get(f"{tool.name}|{call.idempotency_key}")
    if entry is None:
        return None
    done = entry.status is CallStatus.SUCCESS and entry.business_ok
    return entry if done or entry.status in IN_DOUBT else None


async def known_outcome(
    run: NodeRun, tool: ToolContract, entry: r.WriteIndexEntry, call_id: str = ""
) -> Observed:
    if entry.status is CallStatus.SUCCESS:
        value = await run.payload_value(entry.evidence_id) if entry.evidence_id in run.heads else None
        return Observed(tool.name, "reused", entry.evidence_id, result=value)
    return run.refuse(
        tool.name,
        "",
        "the outcome of this very write is not known yet",
        "do not repeat it; it will be verified first",
        call_id,
    )


async def execute_write(
    run: NodeRun,
    tool: ToolContract,
    call: PreparedCall,
    call_id: str,
    *,
    consume: r.ConsumeCheckpoint | None,
) -> Observed:
    """S2, the call, S3. Only a registration in both stores allows the call."""
    scope = run.scope
    reservation = scope.budget.reserve_tool_call()
    head = started_head(run, tool, call, call_id)
    try:
        registered = await scope.register(head, call.args_json, consume)
    except TurnfenceError as error:
        scope.budget.release(reservation)
        if error.reason is Reason.STATE_UNAVAILABLE:
            await _settle_not_called(run, head, CallStatus.UNKNOWN_PRE_CALL, call)
        raise
    if registered.decision is not WriteDecision.PROCEED:
        scope.budget.release(reservation)
        return await _not_proceeding(run, tool, registered, call_id)
    scope.trace(
        TraceEventType.WRITE_REGISTERED,
        TracePhase.TOOL,
        node_id=head.node_id,
        evidence_id=head.evidence_id,
        tool_name=tool.name,
    )
    scope.write_requests[head.evidence_id] = call.args_json
    run.note_settled(head, "")
    _claim_target(run, tool)
    try:
        scope.check_lease()
    except RunAborted:
        scope.budget.release(reservation)
        await _settle_not_called(run, head, CallStatus.CANCELLED, call)
        raise
    announce(run, tool)
    outcome = await _call_to_the_end(scope, tool, call)
    scope.budget.settle_tool_call(reservation, len(outcome.result_json.encode()))
    settled = settled_by(run, tool, head, outcome)
    await record_settled(run, settled, call.args_json, outcome.result_json)
    return observed_of(settled, await run.payload_value(settled.evidence_id))


def _claim_target(run: NodeRun, tool: ToolContract) -> None:
    """Nobody planned a target: the first write that is called becomes it."""
    if not run.node.target and not run.skill.target:
        run.put_node(msgspec.structs.replace(run.node, target=tool.name, target_claimed=True))


async def _call_to_the_end(scope: TurnScope, tool: ToolContract, call: PreparedCall) -> ToolOutcome:
    """The call is awaited to its own time limit, whatever becomes of the run or of this task."""
    task = asyncio.create_task(
        scope.deps.tools.call(
            tool, call.wire_json, idempotency_key=call.idempotency_key, timeout=tool.timeout
        )
    )
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
    return task.result()


async def _settle_not_called(
    run: NodeRun, head: r.EvidenceHead, status: CallStatus, call: PreparedCall
) -> None:
    """Only the harness knows that it made no call. When even that cannot be said, STARTED stays and
    the next begin makes it UNKNOWN: asked about, never repeated."""
    settled = msgspec.structs.replace(head, status=status, finished_at=run.scope.now())
    try:
        await record_settled(run, settled, call.args_json, "")
    except TurnfenceError as error:
        run.scope.axes.error_code = error.log_code


async def _not_proceeding(
    run: NodeRun, tool: ToolContract, registered: r.RegisterWriteResponse, call_id: str
) -> Observed:
    if registered.decision is WriteDecision.REUSED:
        run.heads.setdefault(registered.evidence.evidence_id, registered.evidence)
        value = await run.payload_value(registered.evidence.evidence_id)
        return Observed(tool.name, "reused", registered.evidence.evidence_id, result=value)
    run.scope.axes.error_code = registered.code
    return run.refuse(
        tool.name,
        "",
        "the outcome of this very write is not known yet"
        if registered.code == Reason.WRITE_PENDING_VERIFY.value
        else "this very write may still be under way",
        "do not repeat it now; finish without a conclusion, or go on with something else",
        call_id,
    )


# --- an approval that was confirmed ---------------------------------------------------------------


async def approved_call(run: NodeRun, pending: r.PendingAction) -> tuple[ToolContract, PreparedCall]:
    """The exact bytes that were approved, as a call. Raises ARGS_HASH_MISMATCH when the stored bytes,
    or what would be sent now, are not what was shown (D49, D56)."""
    checkpoint.check_pending(pending)
    tool = next((t for t in run.tools.values() if t.name == pending.tool_name), None)
    if tool is None:
        raise TurnfenceError(Reason.ARGS_HASH_MISMATCH, detail="the tool is not the skill's any more")
    schemas = await run.scope.schemas()
    schema = schemas[tool.name].input_schema if tool.name in schemas else {}
    call = arguments.assemble(tool, schema, arguments.parse_arguments(pending.args_json))
    if call.args_hash != pending.args_hash:
        raise TurnfenceError(Reason.ARGS_HASH_MISMATCH)
    return tool, call


# --- a write whose outcome is unknown -------------------------------------------------------------


async def check_write(scope: TurnScope, head: r.EvidenceHead) -> WriteVerdict:
    """Ask the write's check tool, if it has one: three-valued (D44), never before its time (D35)."""
    tool = scope.deps.catalogue.tools.get(head.tool_name)
    args_json = scope.write_requests.get(head.evidence_id, "")
    if tool is None or tool.verify is None or not args_json:
        return WriteVerdict.CANNOT_TELL
    checker = scope.deps.catalogue.tools[tool.verify.tool]
    given = arguments.parse_arguments(args_json)
    question = canonical(invocation.check_arguments(tool.verify, given, head.idempotency_key))
    scope.emit(
        r.Progress(
            node_id=head.node_id,
            text=say(Reply.CHECKING_WRITE, scope.request.locale, tool=tool.name),
            tool_name=checker.name,
        )
    )
    reservation = scope.budget.reserve_tool_call()
    asked_at = scope.now()
    try:
        outcome = await scope.while_active(
            scope.deps.tools.call(checker, question, idempotency_key="", timeout=checker.timeout)
        )
    finally:
        scope.budget.settle_tool_call(reservation, 0)
    verdict = invocation.evaluate_check(
        tool.verify,
        outcome.result_json,
        failed=outcome.failure is not None,
        asked_at_ms=asked_at,
        believable_from_ms=believable_from(scope, head),
    )
    scope.trace(
        TraceEventType.TOOL_INVOCATION,
        TracePhase.TOOL,
        TraceEventStatus.FAILED if outcome.failure else TraceEventStatus.SUCCEEDED,
        started_at=asked_at,
        node_id=head.node_id,
        evidence_id=head.evidence_id,
        tool_name=checker.name,
        verdict=verdict.value,
    )
    return verdict


def believable_from(scope: TurnScope, head: r.EvidenceHead) -> int:
    tool = scope.deps.catalogue.tools.get(head.tool_name)
    return invocation.believable_from(
        head.started_at or 0,
        tool.timeout if tool else 0.0,
        round(scope.deps.settings.state.lease * 1000),
    )


async def settle_by_verdict(
    scope: TurnScope, head: r.EvidenceHead, verdict: WriteVerdict, *, reason: str
) -> r.EvidenceHead:
    """UNKNOWN → SUCCESS or FAILED, whoever said so."""
    settled = invocation.settled_by_verdict(
        head,
        verdict,
        not_before_ms=believable_from(scope, head),
        reason=reason,
        now_ms=scope.now(),
    )
    (stored,) = await scope.settle(r.Settlement(task_id=head.task_id, node_id=head.node_id, evidence=settled))
    if scope.task is not None and scope.task.task_id == head.task_id:
        scope.task.writes[f"{head.tool_name}|{head.idempotency_key}"] = r.WriteIndexEntry(
            evidence_id=stored.evidence_id,
            status=stored.status,
            business_ok=stored.business_ok,
            not_before=stored.not_before,
        )
    scope.trace(
        TraceEventType.WRITE_SETTLED,
        TracePhase.TOOL,
        node_id=head.node_id,
        evidence_id=head.evidence_id,
        tool_name=head.tool_name,
        call_status=stored.status.value,
        verdict=verdict.value,
    )
    return stored


def verification_of(scope: TurnScope, head: r.EvidenceHead) -> r.TaskCheckpoint:
    """Ask the user; the checkpoint names the evidence, one write at a time (D47)."""
    return checkpoint.verification(
        checkpoint_id=scope.new_id(),
        node_id=head.node_id,
        write=head,
        now_ms=scope.now(),
        locale=scope.request.locale,
    )

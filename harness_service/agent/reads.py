"""Read tools: PREFLIGHT → call → READY or ERROR (lifecycle document 7). A late result is dropped."""

from __future__ import annotations

from harness_service.agent.node_run import NodeRun, Observed, observed_of
from harness_service.core import collection as collections
from harness_service.core import entities, invocation
from harness_service.core.arguments import PreparedCall
from harness_service.core.catalogue import ToolContract
from harness_service.core.replies import Reply, say
from harness_service.ports import ToolOutcome
from turnfence import records as r
from turnfence.axes import (
    CallStatus,
    InformationGain,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
)


def started_head(run: NodeRun, tool: ToolContract, call: PreparedCall, call_id: str) -> r.EvidenceHead:
    """The canonical record as a call begins."""
    settings = run.scope.deps.settings.react
    head = r.EvidenceHead(
        evidence_id=run.scope.new_id(),
        task_id=run.task_id,
        node_id=run.node.node_id,
        tool_name=tool.name,
        side_effect=tool.side_effect,
        status=CallStatus.STARTED,
        idempotency_key=call.idempotency_key if tool.is_write else "",
        args_hash=call.args_hash,
        args_brief=invocation.brief(call.arguments, tool.mask, settings.brief_max_chars),
        round=run.round,
        trace_id=run.scope.request.run_id,
        call_id=call_id,
    )
    return invocation.registered(head, now_ms=run.scope.now())


async def call_read_tool(run: NodeRun, tool: ToolContract, call: PreparedCall, call_id: str) -> Observed:
    """Call it, record its evidence, tell the model. Cancelled at once when the run ends."""
    scope = run.scope
    scope.check_lease()
    reservation = scope.budget.reserve_tool_call()
    head = started_head(run, tool, call, call_id)
    announce(run, tool)
    paid = False
    try:
        outcome = await scope.while_active(
            scope.deps.tools.call(tool, call.wire_json, idempotency_key="", timeout=tool.timeout)
        )
        scope.budget.settle_tool_call(reservation, len(outcome.result_json.encode()))
        paid = True
    finally:
        if not paid:
            scope.budget.settle_tool_call(reservation, 0)
    scope.check_active()
    settled = settled_by(run, tool, head, outcome)
    await record_settled(run, settled, call.args_json, outcome.result_json)
    _collect(run, tool, call, run.heads[settled.evidence_id])
    scope.budget.check()
    return observed_of(settled, await run.payload_value(settled.evidence_id))


def announce(run: NodeRun, tool: ToolContract) -> None:
    run.scope.emit(
        r.Progress(
            node_id=run.node.node_id,
            node_title=run.node.title,
            text=say(Reply.CALLING, run.scope.request.locale, tool=tool.name),
            tool_name=tool.name,
        )
    )


def settled_by(
    run: NodeRun, tool: ToolContract, head: r.EvidenceHead, outcome: ToolOutcome
) -> r.EvidenceHead:
    """The head after the call, by the tables of state document 5.4."""
    settings = run.scope.deps.settings
    now = run.scope.now()
    if outcome.failure is not None:
        failure = invocation.failed_call(outcome.failure, tool.side_effect, tool.on_error)
        return invocation.settled_failure(
            head,
            failure,
            error_code=outcome.failure.value,
            reason=outcome.message or outcome.failure.value.lower().replace("_", " "),
            next_step=_NEXT_STEP[failure.status],
            now_ms=now,
            duration_ms=outcome.duration_ms,
            detail_max_chars=settings.react.observation_error_max_chars,
        )
    verdict = invocation.evaluate_result(tool, outcome.result_json)
    return invocation.settled_success(
        head,
        verdict,
        tool=tool,
        result_json=outcome.result_json,
        now_ms=now,
        duration_ms=outcome.duration_ms,
        entities_json=entities.to_text(verdict.entities, settings.state.evidence_entities_max_chars),
        next_step="correct the request, or do without this tool",
        brief_max_chars=settings.react.brief_max_chars,
        detail_max_chars=settings.react.observation_error_max_chars,
    )


_NEXT_STEP = {
    CallStatus.FAILED: "correct the request, try another tool, or finish with what is known",
    CallStatus.TIMEOUT: "narrow the request, try another tool, or finish with what is known",
    CallStatus.UNKNOWN: "do not repeat it; it will be verified",
}


async def record_settled(run: NodeRun, settled: r.EvidenceHead, request_json: str, payload_json: str) -> None:
    """S3 with everything that follows from it: node, budget of entities, timeline."""
    scope = run.scope
    kept = payload_json if settled.status is CallStatus.SUCCESS else ""
    (stored,) = await scope.settle(
        r.Settlement(
            task_id=settled.task_id,
            node_id=settled.node_id,
            evidence=settled,
            payload_json=kept,
            request_json=request_json,
        )
    )
    run.note_settled(stored, kept)
    failed = stored.status is not CallStatus.SUCCESS or not stored.business_ok
    scope.trace(
        TraceEventType.WRITE_SETTLED if stored.side_effect == "WRITE" else TraceEventType.TOOL_INVOCATION,
        TracePhase.TOOL,
        TraceEventStatus.FAILED if failed else TraceEventStatus.SUCCEEDED,
        started_at=stored.started_at,
        node_id=stored.node_id,
        evidence_id=stored.evidence_id,
        tool_name=stored.tool_name,
        call_status=stored.status.value,
        failure_kind=stored.failure_kind.value,
    )
    if stored.entities and not failed:
        change = entities.merged(
            scope.entities,
            entities.from_text(stored.entities),
            task_id=stored.task_id,
            evidence_id=stored.evidence_id,
            now_ms=scope.now(),
            entities_max=scope.deps.settings.state.entities_max,
        )
        scope.record(*change.changes)


def _collect(run: NodeRun, tool: ToolContract, call: PreparedCall, head: r.EvidenceHead) -> None:
    step = collections.with_result(
        run.collection,
        head.evidence_id,
        collections.scope_key(tool.name, call.args_hash),
        invocation.classify_head(head).evidence,
        run.thresholds,
    )
    run.put_collection(step.collection)
    if step.gain is InformationGain.NO_GAIN:
        run.scope.trace(
            TraceEventType.TOOL_PROGRESS,
            TracePhase.TOOL,
            node_id=run.node.node_id,
            evidence_id=head.evidence_id,
            gain=step.gain.value,
            rated_by="harness",
        )

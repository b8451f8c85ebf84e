"""One node from its selection to its end: open → bind → loop → release or suspension."""

from __future__ import annotations

import msgspec

from harness_service.agent import writes
from harness_service.agent.builtins import Finished
from harness_service.agent.node_run import NodeRun, Observed
from harness_service.agent.react import NodeEnd, react
from harness_service.agent.releasing import Release, release
from harness_service.core import draft as drafts
from harness_service.core import finalise
from harness_service.core import task as tasks
from harness_service.core.budget import BudgetExceeded
from harness_service.core.catalogue import Share
from harness_service.core.invocation import WriteVerdict
from harness_service.core.node import NodeEvent, moved
from harness_service.core.release import SUCCESS
from harness_service.core.replies import Reply, say
from harness_service.ending import TurnEnd
from harness_service.ports import ModelFailed
from harness_service.scope import TurnScope
from turnfence import records as r
from turnfence.axes import (
    CallStatus,
    CancelReason,
    NodeStatus,
    ProcessingStage,
    ReleaseOutcome,
    ResumeAction,
    SideEffect,
    StopReason,
    TraceEventType,
    TracePhase,
)


class Answer(msgspec.Struct, frozen=True):
    """The user's answer to the checkpoint that the node waited at, if there was one."""

    checkpoint: r.TaskCheckpoint
    action: ResumeAction


async def run_node(scope: TurnScope, node_id: str, answer: Answer | None = None) -> TurnEnd:
    """Run a node to its end, and the end through release."""
    scope.focus(node_id)
    scope.stage(ProcessingStage.DIAGNOSIS_RUNNING)
    run = await _open(scope, node_id)
    try:
        end = await _first_answer(run, answer) or await _resolve_unknown(run) or await react(run)
    except BudgetExceeded:
        scope.lifecycle.cancel(CancelReason.BUDGET_EXHAUSTED)
        scope.axes.stop_reason = StopReason.BUDGET_LIMIT_REACHED
        end = None
    except ModelFailed:
        if not run.collection.facts:
            raise
        end = None  # a controlled stop: what was learned so far may still be released
    if isinstance(end, r.TaskCheckpoint):
        return suspended(scope, end)
    return _ended(run, end, await release(run, end))


async def _open(scope: TurnScope, node_id: str) -> NodeRun:
    task = scope.task
    assert task is not None
    await scope.flush()
    opened = await scope.send(
        scope.deps.state.open_node,
        r.OpenNodeRequest(turn=scope.turn, task_id=task.task_id, node_id=node_id),
    )
    node = task.nodes[node_id]
    run = NodeRun(scope, node, scope.deps.catalogue.skills[node.skill_key], opened)
    if node.status is not NodeStatus.RUNNING:
        run.put_node(moved(node, NodeEvent.SELECTED, scope.now()))
    scope.emit(
        r.Progress(
            node_id=node_id,
            node_title=node.title,
            text=say(Reply.WORKING_ON, scope.request.locale, title=node.title),
        )
    )
    await run.bind()
    await run.rebuild_observations()
    return run


# --- what comes before the loop -------------------------------------------------------------------


async def _first_answer(run: NodeRun, answer: Answer | None) -> NodeEnd | None:
    """The user's confirmation is a round of its own (state document 3.3)."""
    if answer is None or answer.action is ResumeAction.REPLY:
        return None
    run.next_round()
    pending = answer.checkpoint.pending_action
    if pending is None:
        said = _VERIFY_REPLIES[answer.action]
        run.act("user", answer.action.value, "", say(said, run.scope.request.locale))
        return None
    run.act("user", answer.action.value, "", say(Reply.USER_CONFIRMED, run.scope.request.locale))
    return await _execute_approved(run, answer, pending)


_VERIFY_REPLIES = {
    ResumeAction.CONFIRM: Reply.USER_SAYS_EFFECTIVE,
    ResumeAction.REJECT: Reply.USER_SAYS_NOT_EFFECTIVE,
}


async def _execute_approved(run: NodeRun, answer: Answer, pending: r.PendingAction) -> NodeEnd | None:
    scope = run.scope
    tool, call = await writes.approved_call(run, pending)
    consume = tasks.consumption(
        run.task_id,
        answer.checkpoint,
        action=answer.action,
        message_id=scope.request.message_id,
        user_id=scope.request.principal.user_id,
        now_ms=scope.now(),
    )
    scope.trace(
        TraceEventType.CHECKPOINT_CONSUMED,
        TracePhase.TASK,
        node_id=run.node.node_id,
        checkpoint_id=answer.checkpoint.checkpoint_id,
        action=answer.action.value,
    )
    observed: Observed = await writes.execute_write(run, tool, call, "", consume=consume)
    if scope.task is not None and scope.task.checkpoint is not None:
        scope.record(consume)  # nothing was registered: the answer is used up all the same
    run.observe(observed, call.arguments)
    return await _resolve_unknown(run)


async def _resolve_unknown(run: NodeRun) -> r.TaskCheckpoint | None:
    """A write of this node whose outcome is unknown is checked, or asked about, before anything goes on."""
    for head in list(run.heads.values()):
        if head.side_effect is not SideEffect.WRITE or head.status is not CallStatus.UNKNOWN:
            continue
        settled = await verify(run.scope, head)
        if settled is None:
            return writes.verification_of(run.scope, head)
        run.note_settled(settled, "")
    return None


async def verify(scope: TurnScope, head: r.EvidenceHead) -> r.EvidenceHead | None:
    """Settle an unknown write by its check tool; None when that cannot tell, or there is none."""
    verdict = await writes.check_write(scope, head)
    if verdict is WriteVerdict.CANNOT_TELL:
        return None
    return await writes.settle_by_verdict(scope, head, verdict, reason=_CHECKED[verdict])


_CHECKED = {
    WriteVerdict.EFFECTIVE: "the check tool found that it took effect",
    WriteVerdict.NOT_EFFECTIVE: "the check tool found that it did not take effect",
}


# --- how a node ends ------------------------------------------------------------------------------


def suspended(
    scope: TurnScope, checkpoint: r.TaskCheckpoint, event: NodeEvent = NodeEvent.LOOP_SUSPENDED
) -> TurnEnd:
    """The task waits for the user; the prompt is this turn's content."""
    return TurnEnd(
        content=finalise.question(checkpoint),
        release=SUCCESS,
        task_touched=True,
        node_id=checkpoint.node_id,
        checkpoint=checkpoint,
        node_event=event,
    )


def _ended(run: NodeRun, end: NodeEnd | None, released: Release) -> TurnEnd:
    if released.decision.outcome is not ReleaseOutcome.FAILED:
        _share_outputs(run)
    if isinstance(end, Finished) and end.claimed:
        run.put_node(msgspec.structs.replace(run.node, target_claimed=True))
    return TurnEnd(
        content=released.content,
        release=released.decision,
        task_touched=True,
        node_id=run.node.node_id,
        node_result=drafts.to_json(released.draft) if released.draft else "",
    )


def _share_outputs(run: NodeRun) -> None:
    """Outputs that the contract shares, at the node's end: the only way into shared values (5.10)."""
    for name, rule in run.skill.outputs.items():
        value = run.space.outputs.get(name)
        if value is None or rule.share is None:
            continue
        shared = msgspec.structs.replace(
            value, source=msgspec.structs.replace(value.source, ref=run.node.node_id, path=name)
        )
        if rule.share is Share.TASK:
            run.scope.record(r.PutTaskShared(task_id=run.task_id, name=name, value=shared))
        else:
            run.scope.record(r.PutSessionShared(name=name, value=shared))

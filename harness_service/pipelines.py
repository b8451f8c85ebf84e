"""What runs in a turn: entry guard → intent decision → one of five pipelines (state document 4 ④)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from harness_service.agent import prompts, writes
from harness_service.agent.executor import Answer, run_node, suspended, verify
from harness_service.agent.model_calls import ask, ask_structured
from harness_service.core import checkpoint as checkpoints
from harness_service.core import dispatch, entry_guard, finalise, graph, plan
from harness_service.core import task as tasks
from harness_service.core.checkpoint import RESUME_EFFECTS, ResumeEffect
from harness_service.core.dispatch import INHERITS_PRIOR, OPENS_TASK, DispatchFacts, Pipeline, TurnDecision
from harness_service.core.entry_guard import GuardDecision, GuardKind
from harness_service.core.invocation import WriteVerdict
from harness_service.core.node import NodeEvent
from harness_service.core.prior import build_prior
from harness_service.core.release import SUCCESS
from harness_service.core.replies import Reply, say
from harness_service.ending import TurnEnd
from harness_service.ports import ChatMessage, ChatRequest, KnowledgeUnavailable, ModelCall, Passage
from harness_service.scope import TaskView, TurnScope
from turnfence import records as r
from turnfence.axes import (
    IntentType,
    ProcessingStage,
    ResumeAction,
    TerminationReason,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
    TurnMode,
)
from turnfence.errors import Reason, TurnfenceError

PASSAGES_MAX = 5


async def run(scope: TurnScope) -> TurnEnd:
    """The turn's pipeline. Raises what ends the run: model failed, budget, fence, stores."""
    unknown = await _write_to_verify(scope)
    task = _open_task(scope)
    request = scope.request
    decision = entry_guard.decide(
        action=request.action,
        has_text=bool(request.text),
        checkpoint=task.checkpoint if task else None,
        checkpoint_id=request.checkpoint_id,
        requested_agent=request.agent_id,
        task_agent=task.metadata.agent_id if task else "",
        now_ms=scope.now(),
        reconfirm_after_ms=_reconfirm_after_ms(scope),
        unresolved_write=unknown,
    )
    scope.trace(
        TraceEventType.ENTRY_GUARD,
        TracePhase.ADMISSION,
        TraceEventStatus.REJECTED if decision.kind is GuardKind.REPLY else TraceEventStatus.SUCCEEDED,
        decision=decision.kind.value,
    )
    if decision.kind is GuardKind.VERIFY_FIRST and unknown is not None:
        return _ask_to_verify(scope, unknown)
    return await _guarded(scope, decision)


def _open_task(scope: TurnScope) -> TaskView | None:
    return scope.task if scope.task is not None and not scope.task.closed else None


def _reconfirm_after_ms(scope: TurnScope) -> int:
    return round(scope.deps.settings.state.reconfirm_after * 1000)


async def _write_to_verify(scope: TurnScope) -> r.EvidenceHead | None:
    """The active task's write that nobody knows the outcome of, once its check tool could not tell.

    One that a VERIFY checkpoint asks about already is left to the user's answer."""
    task = _open_task(scope)
    if task is None:
        return None
    while (head := entry_guard.write_to_verify(scope.unresolved, task.task_id)) is not None:
        asked = task.checkpoint is not None and task.checkpoint.evidence_id == head.evidence_id
        if asked or await verify(scope, head) is None:
            return head
    return None


def _ask_to_verify(scope: TurnScope, head: r.EvidenceHead) -> TurnEnd:
    """VERIFY takes the place of an approval that is open for that very write (D54)."""
    _goes_on(scope)
    task = _open_task(scope)
    if task is not None and task.checkpoint is not None:
        scope.record(_consumption(scope, task, ResumeAction.CANCEL))
    scope.focus(head.node_id)
    return suspended(scope, writes.verification_of(scope, head), NodeEvent.WRITE_UNKNOWN)


def _goes_on(scope: TurnScope) -> None:
    scope.axes.intent = IntentType.DIAGNOSIS
    scope.axes.turn_mode = TurnMode.CONTINUE_TASK
    if scope.task is not None:
        scope.axes.task_id = scope.task.task_id
        scope.axes.agent_id = scope.task.metadata.agent_id


async def _guarded(scope: TurnScope, decision: GuardDecision) -> TurnEnd:
    """What the entry guard decided, or continuing from text, carried out."""
    if decision.kind is GuardKind.REPLY:
        assert decision.notice is not None
        return _notice(scope, decision.notice, with_prompt=decision.with_prompt)
    if decision.kind is GuardKind.RECONFIRM:
        return _reconfirm(scope)
    if decision.kind is GuardKind.CANCEL_TASK:
        return _end_by_user(scope, ResumeAction.CANCEL)
    if decision.kind is GuardKind.RESUME:
        assert decision.action is not None
        return await _resume(scope, decision.action)
    if decision.kind is GuardKind.SWITCH_AGENT:
        return await _decided(scope, _switch(scope))
    return await _decided(scope, await _route(scope))


def _notice(scope: TurnScope, code: Reply, *, with_prompt: bool = False) -> TurnEnd:
    task = _open_task(scope)
    prompt = task.checkpoint if with_prompt and task else None
    return TurnEnd(content=finalise.notice(code, scope.request.locale, prompt=prompt), release=SUCCESS)


def _reconfirm(scope: TurnScope) -> TurnEnd:
    """An expired approval never executes: a fresh one with a new id is shown (D55)."""
    task = _open_task(scope)
    assert task is not None
    assert task.checkpoint is not None
    _goes_on(scope)
    fresh = checkpoints.renewed(
        task.checkpoint,
        checkpoint_id=scope.new_id(),
        now_ms=scope.now(),
        reconfirm_after_ms=_reconfirm_after_ms(scope),
    )
    scope.record(_consumption(scope, task, ResumeAction.CANCEL))
    scope.focus(fresh.node_id)
    return suspended(scope, fresh)


def _consumption(scope: TurnScope, task: TaskView, action: ResumeAction) -> r.ConsumeCheckpoint:
    assert task.checkpoint is not None
    return tasks.consumption(
        task.task_id,
        task.checkpoint,
        action=action,
        message_id=scope.request.message_id,
        user_id=scope.request.principal.user_id,
        now_ms=scope.now(),
    )


# --- an answer to a checkpoint --------------------------------------------------------------------


async def _resume(scope: TurnScope, action: ResumeAction) -> TurnEnd:
    """The resume table of state document 5.3."""
    task = _open_task(scope)
    assert task is not None
    assert task.checkpoint is not None
    _goes_on(scope)
    checkpoint = task.checkpoint
    effect = RESUME_EFFECTS[checkpoint.type, action]
    if effect in (ResumeEffect.DROP_PENDING, ResumeEffect.CANCEL_TASK):
        return _end_by_user(scope, action)
    if effect in _VERDICTS:
        await _settle_by_user(scope, checkpoint, effect)
    consume = None
    if effect is not ResumeEffect.EXECUTE_PENDING:
        consume = _consumption(scope, task, action)
        scope.trace(
            TraceEventType.CHECKPOINT_CONSUMED,
            TracePhase.TASK,
            node_id=checkpoint.node_id,
            checkpoint_id=checkpoint.checkpoint_id,
            action=action.value,
        )
    scope.focus(checkpoint.node_id)
    node = task.nodes[checkpoint.node_id]
    scope.record(*tasks.resume_task(task.metadata, node, scope.now(), consume).flush)
    return await run_node(scope, checkpoint.node_id, Answer(checkpoint, action))


_VERDICTS = {
    ResumeEffect.SETTLE_EFFECTIVE: (WriteVerdict.EFFECTIVE, Reply.USER_SAYS_EFFECTIVE),
    ResumeEffect.SETTLE_NOT_EFFECTIVE: (WriteVerdict.NOT_EFFECTIVE, Reply.USER_SAYS_NOT_EFFECTIVE),
}


async def _settle_by_user(scope: TurnScope, checkpoint: r.TaskCheckpoint, effect: ResumeEffect) -> None:
    """The user knows: the write named by the checkpoint, and only that one, is settled (D47)."""
    verdict, said = _VERDICTS[effect]
    for head in scope.unresolved:
        if head.evidence_id == checkpoint.evidence_id:
            await writes.settle_by_verdict(scope, head, verdict, reason=say(said, scope.request.locale))
            return


def _end_by_user(scope: TurnScope, action: ResumeAction) -> TurnEnd:
    """REJECT and CANCEL: nothing pending is executed; node and task end (5.3)."""
    task = _open_task(scope)
    assert task is not None
    _goes_on(scope)
    node_id = task.checkpoint.node_id if task.checkpoint else task.metadata.current_node_id
    unresolved = [head for head in scope.unresolved if head.task_id == task.task_id]
    return TurnEnd(
        content=finalise.task_ended_by_user(task.checkpoint, action, unresolved, scope.request.locale),
        release=SUCCESS,
        task_touched=True,
        node_id=node_id,
        ended_by_user=True,
        consume=_consumption(scope, task, action) if task.checkpoint else None,
    )


# --- the intent decision --------------------------------------------------------------------------


async def _route(scope: TurnScope) -> TurnDecision:
    scope.stage(ProcessingStage.ROUTING)
    scope.trace(TraceEventType.ROUTING_ATTEMPT, TracePhase.ROUTING, TraceEventStatus.STARTED)
    started = scope.now()
    decision = await ask_structured(
        scope,
        ModelCall.TURN_DECISION,
        prompts.router_messages(scope),
        prompts.briefing(scope),
        dispatch.TURN_DECISION_SCHEMA,
        dispatch.parse_decision,
    )
    corrected = dispatch.corrected(decision, _facts(scope))
    scope.trace(
        TraceEventType.ROUTING_DECISION,
        TracePhase.ROUTING,
        started_at=started,
        mode=corrected.mode.value,
        intent=corrected.intent.value,
        proposed=decision.mode.value,
    )
    return corrected


def _facts(scope: TurnScope) -> DispatchFacts:
    task = _open_task(scope)
    return DispatchFacts(
        agents=tuple(scope.deps.catalogue.agents),
        task_agent=task.metadata.agent_id if task else "",
        requested_agent=scope.request.agent_id,
        has_records=bool(scope.records) or scope.previous_turn is not None,
    )


def _switch(scope: TurnScope) -> TurnDecision:
    """The caller named another agent: no model is asked whether it may."""
    decision = TurnDecision(
        TurnMode.SWITCH_AGENT,
        IntentType.DIAGNOSIS,
        agent_id=scope.request.agent_id,
        goal_summary=scope.request.text,
    )
    return dispatch.corrected(decision, _facts(scope))


async def _decided(scope: TurnScope, decision: TurnDecision) -> TurnEnd:
    scope.axes.turn_mode = decision.mode
    scope.axes.intent = decision.intent
    if decision.agent_id:
        scope.axes.agent_id = decision.agent_id
    return await _PIPELINES[dispatch.pipeline_of(decision)](scope, decision)


async def _system_chat(scope: TurnScope, decision: TurnDecision) -> TurnEnd:
    scope.stage(ProcessingStage.SYSTEM_RESPONDING)
    text = decision.reply or await _answer(scope, ModelCall.SYSTEM_ANSWER, prompts.chat_messages(scope))
    return TurnEnd(content=finalise.chat(text), release=SUCCESS)


async def _knowledge(scope: TurnScope, decision: TurnDecision) -> TurnEnd:
    """One search, one answer that cites what was found."""
    scope.stage(ProcessingStage.KNOWLEDGE_SEARCHING)
    query = scope.user_message.text if scope.user_message else scope.request.text
    started = scope.now()
    try:
        passages = await scope.while_active(_search(scope, query))
    except KnowledgeUnavailable:
        scope.trace(
            TraceEventType.KNOWLEDGE_SEARCH, TracePhase.TOOL, TraceEventStatus.FAILED, started_at=started
        )
        scope.lifecycle.fail(TerminationReason.INTERNAL_FAILURE)
        return TurnEnd()
    scope.trace(
        TraceEventType.KNOWLEDGE_SEARCH, TracePhase.TOOL, started_at=started, found=str(len(passages))
    )
    if not passages:
        return TurnEnd(content=finalise.knowledge("", [], scope.request.locale), release=SUCCESS)
    scope.stage(ProcessingStage.KNOWLEDGE_ANSWERING)
    text = await _answer(
        scope,
        ModelCall.KNOWLEDGE_ANSWER,
        prompts.knowledge_messages(scope, query, passages),
        passages,
    )
    sources = [r.KnowledgeSource(p.title, p.location, p.excerpt) for p in passages]
    return TurnEnd(content=finalise.knowledge(text, sources, scope.request.locale), release=SUCCESS)


async def _search(scope: TurnScope, query: str) -> tuple[Passage, ...]:
    found = await scope.deps.knowledge.search(query, limit=PASSAGES_MAX, timeout=10.0)
    return tuple(found)


async def _answer(
    scope: TurnScope,
    call: ModelCall,
    messages: tuple[ChatMessage, ...],
    passages: tuple[Passage, ...] = (),
) -> str:
    request = ChatRequest(call=call, messages=messages, briefing=prompts.briefing(scope, passages=passages))
    reply = await ask(scope, request)
    return reply.text


async def _clarify(scope: TurnScope, decision: TurnDecision) -> TurnEnd:
    return TurnEnd(
        content=finalise.chat(decision.reply or say(Reply.CLARIFY, scope.request.locale)),
        release=SUCCESS,
    )


async def _cancel(scope: TurnScope, decision: TurnDecision) -> TurnEnd:
    if _open_task(scope) is None:
        return _notice(scope, Reply.NO_TASK_TO_CANCEL)
    end = _end_by_user(scope, ResumeAction.CANCEL)
    scope.axes.turn_mode = TurnMode.CANCEL_TASK
    return end


async def _task(scope: TurnScope, decision: TurnDecision) -> TurnEnd:
    if decision.mode not in OPENS_TASK:
        return await _continue(scope)
    _open_new(scope, decision)
    node = await _plan(scope, decision)
    return await run_node(scope, node.node_id)


_PIPELINES: Mapping[Pipeline, Callable[[TurnScope, TurnDecision], Awaitable[TurnEnd]]] = {
    Pipeline.SYSTEM_CHAT: _system_chat,
    Pipeline.KNOWLEDGE: _knowledge,
    Pipeline.CLARIFY: _clarify,
    Pipeline.CANCEL_TASK: _cancel,
    Pipeline.TASK: _task,
}


# --- tasks ----------------------------------------------------------------------------------------


async def _continue(scope: TurnScope) -> TurnEnd:
    """The open task goes on: its question is answered, or its node runs again."""
    task = _open_task(scope)
    assert task is not None
    _goes_on(scope)
    decision = entry_guard.decide_continue(task.checkpoint, scope.now(), _reconfirm_after_ms(scope))
    if decision.kind is not GuardKind.PASS:
        return await _guarded(scope, decision)
    graph.check_loaded(list(task.nodes.values()), task.edges, task.metadata.current_node_id)
    node = graph.next_node(list(task.nodes.values()), task.edges)
    if node is None:
        raise TurnfenceError(Reason.DELEGATE_BROKEN, detail="an open task has no node to run")
    return await run_node(scope, node.node_id)


def _open_new(scope: TurnScope, decision: TurnDecision) -> None:
    """Give the open task up, and open the new one in the same flush: there is never none, nor two."""
    abandoned = _open_task(scope)
    if abandoned is not None:
        state = r.TaskState(
            metadata=abandoned.metadata,
            nodes=list(abandoned.nodes.values()),
            edges=abandoned.edges,
            checkpoint=abandoned.checkpoint,
        )
        step = tasks.abandon_task(
            state,
            final_message=say(Reply.TASK_CANCELLED, scope.request.locale),
            message_id=scope.request.message_id,
            user_id=scope.request.principal.user_id,
            now_ms=scope.now(),
            entities=scope.entities,
        )
        scope.record(*step.persist)
        scope.trace(TraceEventType.TASK_CLOSED, TracePhase.TASK, end="ABANDONED")
    settings = scope.deps.settings.state
    prior = None
    if decision.mode in INHERITS_PRIOR:
        prior = build_prior(
            scope.records,
            scope.entities,
            reason=decision.mode.value,
            tasks_max=settings.prior_tasks_max,
            entities_max=settings.prior_entities_max,
        )
    opened = tasks.open_task(
        task_id=scope.new_id(),
        agent_id=scope.axes.agent_id,
        goal_summary=decision.goal_summary or scope.request.text[:200],
        request=scope.user_message.text if scope.user_message else scope.request.text,
        run_id=scope.request.run_id,
        source_message_id=scope.request.message_id,
        now_ms=scope.now(),
        prior=prior,
    )
    scope.record(*opened.flush)
    if not scope.conversation.title:
        scope.record(r.PutConversation(title=opened.metadata.goal_summary))
    scope.touch()
    scope.trace(TraceEventType.TASK_OPENED, TracePhase.TASK, mode=decision.mode.value)


async def _plan(scope: TurnScope, decision: TurnDecision) -> r.TaskNode:
    """One node; an agent with one skill is not asked which."""
    catalogue = scope.deps.catalogue
    agent = catalogue.agents[scope.axes.agent_id]
    assert scope.task is not None
    objective = decision.goal_summary or ""
    if len(agent.skills) == 1:
        planned = plan.single_node(agent, catalogue, objective, scope.new_id)
    else:
        planned = await ask_structured(
            scope,
            ModelCall.TASK_PLAN,
            prompts.plan_messages(scope, agent.key, scope.task.metadata.request),
            prompts.briefing(scope),
            plan.TASK_PLAN_SCHEMA,
            lambda text: plan.parse_plan(text, agent, catalogue, scope.new_id, nodes_max=1),
        )
    (node,) = planned.nodes
    scope.record(*tasks.focus_on(scope.task.metadata, node).flush)
    scope.trace(TraceEventType.PLAN_DECISION, TracePhase.TASK, node_id=node.node_id, skill=node.skill_key)
    return node

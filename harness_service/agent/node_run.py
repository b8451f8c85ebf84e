"""NodeRun: one node while it runs (state document 3.3), and what its tools' answers become."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from harness_service.core import collection as collections
from harness_service.core.arguments import EvidencePayload, KnownValues, UserText, bind_inputs
from harness_service.core.canonical import JsonRefused, parse_json
from harness_service.core.catalogue import Skill, ToolContract
from harness_service.core.collection import Collection, Thresholds
from harness_service.core.display import clean, cut
from harness_service.core.invocation import RESULT_MAX_KEYS, classify_head
from harness_service.core.task import focus_on
from harness_service.ports import Observation
from harness_service.scope import TurnScope
from turnfence import records as r
from turnfence.axes import (
    CallStatus,
    DialogueRole,
    EvidenceStatus,
    InvocationStatus,
    MessageType,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
)


class Observed(msgspec.Struct, frozen=True):
    """What one call came to, as the model is told. ``progress``: it counts against standing still."""

    tool: str
    status: str  # ok | empty | refused | failed | unknown | reused
    evidence_id: str = ""
    result: Any = None
    reason: str = ""
    next_step: str = ""

    @property
    def progress(self) -> bool:
        return self.status in ("ok", "empty", "reused", "unknown", "failed")


class NodeRun:
    """A node's space and evidence as this turn sees them; changes go out through the scope."""

    def __init__(self, scope: TurnScope, node: r.TaskNode, skill: Skill, opened: r.OpenNodeResponse) -> None:
        self.scope = scope
        self.node = node
        self.skill = skill
        self.tools: Mapping[str, ToolContract] = {
            tool.wire_name: tool for tool in scope.deps.catalogue.tools_of(skill.key)
        }
        self.space = opened.space
        self.heads: dict[str, r.EvidenceHead] = {head.evidence_id: head for head in opened.evidence}
        self.dialogue = list(opened.dialogue)
        self.actions: list[r.NodeAction] = list(opened.space.actions)
        self.payloads: dict[str, str] = {}
        self.observations: list[Observation] = []
        self.collection: Collection = collections.from_notes(opened.space.state, opened.evidence)
        self.round = opened.space.rounds
        self.no_progress = 0
        scope.evidence.update(self.heads)

    @property
    def task_id(self) -> str:
        assert self.scope.task is not None
        return self.scope.task.task_id

    @property
    def thresholds(self) -> Thresholds:
        settings = self.scope.deps.settings.collection
        return Thresholds(no_gain=settings.no_gain, violations=settings.violations)

    # --- changes --------------------------------------------------------------------------------

    def next_round(self) -> None:
        self.round += 1
        self.put_space(rounds=self.round)

    def put_space(self, **fields: Any) -> None:
        self.scope.record(r.PutNodeSpace(task_id=self.task_id, node_id=self.node.node_id, **fields))

    def put_node(self, node: r.TaskNode) -> None:
        """The node has moved; it stays the task's focus."""
        self.node = node
        assert self.scope.task is not None
        self.scope.record(*focus_on(self.scope.task.metadata, node).flush)
        self.scope.trace(
            TraceEventType.NODE_TRANSITION, TracePhase.AGENT, node_id=node.node_id, to=node.status.value
        )

    def put_collection(self, collection: Collection) -> None:
        """Keep what the collection has become, on the run's axes and in the node's notes."""
        stopped = collection.stop_reason is not None and self.collection.stop_reason is None
        changed = collections.to_notes(collection, since=self.collection)
        self.collection = collection
        axes = self.scope.axes
        axes.collection_state = collection.state
        axes.stop_reason = collection.stop_reason
        if changed:
            self.put_space(state=changed)
        if stopped and collection.stop_reason is not None:
            self.scope.trace(
                TraceEventType.COLLECTION_STOP,
                TracePhase.AGENT,
                node_id=self.node.node_id,
                stop_reason=collection.stop_reason.value,
                collection_state=collection.state.value,
            )

    def act(self, kind: str, name: str, arguments: str, result: str, call_id: str = "") -> None:
        """Something that leaves no business evidence: a built-in, a refusal, the user's answer."""
        limit = self.scope.deps.settings.state.node_action_max_chars
        action = r.NodeAction(
            round=self.round,
            kind=kind,
            name=name,
            arguments_brief=clean(arguments, limit),
            result_brief=clean(result, limit),
            at=self.scope.now(),
            call_id=call_id,
        )
        self.actions.append(action)
        self.put_space(actions=[action])

    def say(self, text: str) -> None:
        """The model's words between its calls: part of the node's history, not of the conversation's."""
        limit = self.scope.deps.settings.state.message_max_bytes
        message = r.DialogueMessage(
            message_id=self.scope.new_id(),
            role=DialogueRole.AGENT,
            type=MessageType.AGENT_REPLY,
            text=cut(text, limit),
            trace_id=self.scope.request.run_id,
            task_id=self.task_id,
            node_id=self.node.node_id,
            round=self.round,
            created_at=self.scope.now(),
        )
        self.dialogue.append(message)
        self.scope.record(r.AppendMessage(message=message))

    def refuse(self, tool: str, arguments: str, reason: str, next_step: str, call_id: str = "") -> Observed:
        """A call that was not made; the model is told why and what to do."""
        self.act("refused", tool, arguments, f"{reason}. Next step: {next_step}", call_id)
        self.scope.trace(
            TraceEventType.TOOL_REQUEST_REJECTED,
            TracePhase.TOOL,
            TraceEventStatus.REJECTED,
            node_id=self.node.node_id,
            tool_name=tool,
        )
        return Observed(tool, "refused", reason=reason, next_step=next_step)

    def note_settled(self, head: r.EvidenceHead, payload_json: str) -> None:
        """Evidence of this node has its final (or UNKNOWN) state."""
        self.heads[head.evidence_id] = head
        if payload_json:
            self.payloads[head.evidence_id] = payload_json
        if head.idempotency_key and self.scope.task is not None:
            self.scope.task.writes[f"{head.tool_name}|{head.idempotency_key}"] = r.WriteIndexEntry(
                evidence_id=head.evidence_id,
                status=head.status,
                business_ok=head.business_ok,
                not_before=head.not_before,
            )

    # --- values ---------------------------------------------------------------------------------

    async def payload(self, evidence_id: str) -> str:
        """The tool's payload text; empty when it has none. Asked of the state service once."""
        if evidence_id not in self.payloads:
            head = self.heads.get(evidence_id)
            if head is None or head.status is not CallStatus.SUCCESS:
                return ""
            if not head.payload_bytes:
                return head.result_brief
            data = await self.scope.deps.state.read_payload(
                r.ReadPayloadRequest(turn=self.scope.turn, task_id=head.task_id, evidence_id=evidence_id),
                timeout=self.scope.deps.settings.state.call_timeout,
            )
            self.payloads[evidence_id] = data.decode()
        return self.payloads[evidence_id]

    async def payload_value(self, evidence_id: str) -> Any:
        text = await self.payload(evidence_id)
        if not text:
            return None
        try:
            return parse_json(text, max_keys=RESULT_MAX_KEYS)
        except JsonRefused:
            return text

    def ready(self) -> list[r.EvidenceHead]:
        """Evidence that may be cited: READY, in the order of its rounds."""
        heads = [h for h in self.heads.values() if classify_head(h).invocation is InvocationStatus.READY]
        return sorted(heads, key=lambda head: (head.round, head.started_at or 0, head.evidence_id))

    async def known_values(self) -> KnownValues:
        """Everything an argument may come from, in this turn and task."""
        scope = self.scope
        task = scope.task
        texts = [
            UserText(message.message_id, message.text)
            for message in scope.dialogue
            if message.role is DialogueRole.USER
        ]
        return KnownValues(
            user_texts=tuple(reversed(texts)),
            evidence=tuple(
                [
                    EvidencePayload(head.evidence_id, await self.payload_value(head.evidence_id))
                    for head in self.ready()
                ]
            ),
            shared=task.shared if task else {},
            session=scope.session_shared,
            prior=task.prior if task else None,
        )

    async def bind(self) -> None:
        """Bind the skill's inputs once: what is bound already is never overwritten."""
        bound = bind_inputs(self.skill.inputs, await self.known_values())
        fresh = {name: value for name, value in bound.items() if name not in self.space.inputs}
        if fresh:
            self.space = msgspec.structs.replace(self.space, inputs={**self.space.inputs, **fresh})
            self.put_space(inputs=fresh)

    async def rebuild_observations(self) -> None:
        """What earlier turns of this node observed, for a model that follows rules."""
        for head in sorted(self.heads.values(), key=lambda h: (h.round, h.started_at or 0)):
            observed = observed_of(head, await self.payload_value(head.evidence_id))
            self.observe(observed, _brief_arguments(head.args_brief), head.round)

    def observe(self, observed: Observed, arguments: Any, round_: int | None = None) -> None:
        self.observations.append(
            Observation(
                evidence_id=observed.evidence_id,
                tool=observed.tool,
                status=observed.status,
                arguments=arguments,
                result=observed.result,
                reason=observed.reason,
                round=self.round if round_ is None else round_,
            )
        )


def _brief_arguments(brief: str) -> Any:
    try:
        return json.loads(brief) if brief else {}
    except ValueError:
        return {}


def observed_of(head: r.EvidenceHead, value: Any) -> Observed:
    """How the model is told of settled evidence (catalogue design: the tool message)."""
    if head.status in (CallStatus.UNKNOWN, CallStatus.UNKNOWN_PRE_CALL, CallStatus.STARTED):
        return Observed(
            head.tool_name,
            "unknown",
            head.evidence_id,
            reason=head.detail or "whether this took effect is not known",
            next_step="do not repeat it; it will be verified",
        )
    evidence = classify_head(head).evidence
    if evidence is EvidenceStatus.EVIDENCE_FOUND:
        return Observed(head.tool_name, "ok", head.evidence_id, result=value)
    if evidence is EvidenceStatus.NO_EVIDENCE:
        return Observed(head.tool_name, "empty", head.evidence_id, result=value)
    return Observed(
        head.tool_name, "failed", head.evidence_id, reason=head.detail or "the call failed", result=None
    )

"""Typed changes → operations of flush.lua, one function per kind of change.

Only what changed travels and is written; each function names the dirty members that tell the next
persist what to bring to SQL (state document 2.2; design: state.md, "One source of truth").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from state_service.core import keys, members
from state_service.ports import Op, OpName
from turnfence import records as r
from turnfence.axes import CallStatus, SideEffect
from turnfence.errors import invalid
from turnfence.records import to_json

UNRESOLVED = frozenset({CallStatus.STARTED, CallStatus.UNKNOWN, CallStatus.UNKNOWN_PRE_CALL})


class Limits(msgspec.Struct, frozen=True):
    """The window sizes of the specification's section 6.1 that shape operations."""

    dialogue_max: int = 60
    records_max: int = 20
    node_actions_max: int = 50


class Outcome(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Stored form of a run's end: value of ``commit:<run>`` and ``run:<run>`` in the outbox."""

    run: r.Run
    closing_events: list[r.TurnEvent] = []
    version: int = 0


def operations(turn: r.TurnRef, sequence: int, changes: Iterable[r.StateChange], limits: Limits) -> list[Op]:
    """All operations of one flush, in the order of its changes."""
    ops: list[Op] = []
    for position, change in enumerate(changes):
        ops.extend(_RULES[type(change)](_Context(turn, sequence, position, limits), change))
    return ops


class _Context(msgspec.Struct, frozen=True):
    turn: r.TurnRef
    sequence: int
    position: int
    limits: Limits

    @property
    def message_idx(self) -> int:
        """Order of a message within its turn: flushes are numbered, changes have a place."""
        return self.sequence * 1000 + self.position


C = TypeVar("C")


def hset(key: str, field: str, value: str) -> Op:
    return Op(OpName.HSET, key=key, field=field, value=value)


def dirty(member: str) -> Op:
    return Op(OpName.DIRTY, field=member)


def outbox(member: str, value: str) -> Op:
    return Op(OpName.OUTBOX, field=member, value=value)


def _append_message(at: _Context, change: r.AppendMessage) -> list[Op]:
    message = msgspec.structs.replace(
        change.message, version=at.turn.version, idx=at.message_idx, trace_id=at.turn.run_id
    )
    return message_ops(message, at.limits)


def message_ops(message: r.DialogueMessage, limits: Limits) -> list[Op]:
    body = to_json(message)
    return [
        Op(OpName.LPUSH_TRIM, key=keys.DIALOGUE, value=body, number=limits.dialogue_max),
        outbox(members.message(message.message_id), body),
    ]


def _put_conversation(at: _Context, change: r.PutConversation) -> list[Op]:
    ops = [dirty(members.CONVERSATION)]
    if change.title is not None:
        ops.append(hset(keys.STATE, "title", change.title))
    if change.active_task_id is not None:
        ops.append(hset(keys.STATE, "activeTaskId", change.active_task_id))
    return ops


def _put_session_shared(at: _Context, change: r.PutSessionShared) -> list[Op]:
    return [hset(keys.SHARED, change.name, to_json(change.value)), dirty(members.CONVERSATION)]


def _put_task(at: _Context, change: r.PutTask) -> list[Op]:
    task_id = change.task.task_id
    return [*metadata_ops(change.task), dirty(members.task(task_id))]


def metadata_ops(task: r.TaskMetadata) -> list[Op]:
    """The metadata hash, a field for each field of the record; None is written as empty."""
    key = keys.metadata(task.task_id)
    builtins = msgspec.to_builtins(task)
    return [
        hset(key, field.encode_name, _flat(builtins.get(field.encode_name)))
        for field in msgspec.structs.fields(r.TaskMetadata)
    ]


def _flat(value: Any) -> str:
    return "" if value is None else str(value)


def _put_node(at: _Context, change: r.PutNode) -> list[Op]:
    return [
        hset(keys.graph(change.task_id), change.node.node_id, to_json(change.node)),
        dirty(members.node(change.task_id, change.node.node_id)),
    ]


def _put_edge(at: _Context, change: r.PutEdge) -> list[Op]:
    edge = change.edge
    if edge.from_node_id == edge.to_node_id:
        raise invalid("changes.put_edge", "an edge needs two different nodes")
    return [
        Op(OpName.JAPPEND, key=keys.graph(change.task_id), field=keys.EDGES_FIELD, value=to_json(edge)),
        dirty(members.edges(change.task_id)),
    ]


def _put_checkpoint(at: _Context, change: r.PutCheckpoint) -> list[Op]:
    return [
        Op(OpName.SET, key=keys.checkpoint(change.task_id), value=to_json(change.checkpoint)),
        dirty(members.checkpoint(change.task_id)),
    ]


def _consume_checkpoint(at: _Context, change: r.ConsumeCheckpoint) -> list[Op]:
    return consume_ops(change)


def consume_ops(change: r.ConsumeCheckpoint) -> list[Op]:
    """The checkpoint is gone and its resume record waits for SQL, in one step (D53)."""
    resume_id = f"{change.checkpoint_id}.{change.message_id}"[:64]
    record = r.ResumeRecord(
        resume_id=resume_id,
        checkpoint_id=change.checkpoint_id,
        task_id=change.task_id,
        message_id=change.message_id,
        action=change.action,
        acted_at=change.acted_at,
        user_id=change.user_id,
    )
    return [
        Op(OpName.DEL, key=keys.checkpoint(change.task_id)),
        dirty(members.checkpoint_gone(change.task_id, change.checkpoint_id)),
        outbox(members.resume(resume_id), to_json(record)),
    ]


def _put_task_shared(at: _Context, change: r.PutTaskShared) -> list[Op]:
    return [
        hset(keys.task_shared(change.task_id), change.name, to_json(change.value)),
        dirty(members.task(change.task_id)),
    ]


def _put_prior(at: _Context, change: r.PutPrior) -> list[Op]:
    return [
        Op(OpName.SET, key=keys.prior(change.task_id), value=to_json(change.prior)),
        dirty(members.task(change.task_id)),
    ]


def _put_node_space(at: _Context, change: r.PutNodeSpace) -> list[Op]:
    return [
        *space_ops(change, at.limits),
        dirty(members.node(change.task_id, change.node_id)),
    ]


def space_ops(change: r.PutNodeSpace, limits: Limits) -> list[Op]:
    """A field per entry (``inputs.<name>``), so that a step costs what it changed."""
    key = keys.space(change.task_id, change.node_id)
    ops = [hset(key, f"inputs.{name}", to_json(value)) for name, value in change.inputs.items()]
    ops += [hset(key, f"outputs.{name}", to_json(value)) for name, value in change.outputs.items()]
    ops += [hset(key, f"state.{name}", value) for name, value in change.state.items()]
    if change.rounds is not None:
        ops.append(hset(key, "rounds", str(change.rounds)))
    if change.tokens is not None:
        ops.append(hset(key, "tokens", str(change.tokens)))
    actions = keys.actions(change.task_id, change.node_id)
    ops += [
        Op(OpName.LPUSH_TRIM, key=actions, value=to_json(action), number=limits.node_actions_max)
        for action in change.actions
    ]
    return ops


def _put_entity(at: _Context, change: r.PutEntity) -> list[Op]:
    key = f"{change.entity_type}:{change.entity_id}"
    if change.entry is None:
        return [Op(OpName.HDEL, key=keys.ENTITIES, field=key), dirty(members.entity_gone(key))]
    return [hset(keys.ENTITIES, key, to_json(change.entry)), dirty(members.entity(key))]


def _close_task(at: _Context, change: r.CloseTask) -> list[Op]:
    """In memory only (state document 5.8): record and active task change when the commit is done."""
    key = keys.metadata(change.task_id)
    return [
        hset(key, "status", change.status.value),
        hset(key, "finalMessage", change.final_message),
        hset(key, "finishedAt", _flat(change.closed_at)),
        hset(key, "record", to_json(change.record)),
        dirty(members.task(change.task_id)),
        dirty(members.CONVERSATION),
    ]


def _append_event(at: _Context, change: r.AppendEvent) -> list[Op]:
    return [event_op(at.turn.run_id, change.event)]


def event_op(run_id: str, event: r.TurnEvent) -> Op:
    return Op(OpName.XADD, key=keys.events(run_id), field=str(event.sequence), value=to_json(event))


def _append_trace(at: _Context, change: r.AppendTrace) -> list[Op]:
    return [outbox(members.trace(at.turn.run_id, change.trace.sequence), to_json(change.trace))]


def _put_run(at: _Context, change: r.PutRun) -> list[Op]:
    return [Op(OpName.SET, key=keys.run(at.turn.run_id), value=to_json(change.run))]


_RULES: dict[type[Any], Callable[[_Context, Any], list[Op]]] = {
    r.AppendMessage: _append_message,
    r.PutConversation: _put_conversation,
    r.PutSessionShared: _put_session_shared,
    r.PutTask: _put_task,
    r.PutNode: _put_node,
    r.PutEdge: _put_edge,
    r.PutCheckpoint: _put_checkpoint,
    r.ConsumeCheckpoint: _consume_checkpoint,
    r.PutTaskShared: _put_task_shared,
    r.PutPrior: _put_prior,
    r.PutNodeSpace: _put_node_space,
    r.PutEntity: _put_entity,
    r.CloseTask: _close_task,
    r.AppendEvent: _append_event,
    r.AppendTrace: _append_trace,
    r.PutRun: _put_run,
}


# --- evidence -------------------------------------------------------------------------------------


def evidence_ops(head: r.EvidenceHead) -> list[Op]:
    """A head with the indexes that follow from it: ``writes`` and ``unresolved`` for writes."""
    ops = [
        hset(keys.evidence(head.task_id, head.node_id), head.evidence_id, to_json(head)),
        dirty(members.evidence(head.task_id, head.node_id, head.evidence_id)),
    ]
    if head.side_effect is not SideEffect.WRITE or not head.idempotency_key:
        return ops
    field = keys.write_field(head.tool_name, head.idempotency_key)
    ops.append(hset(keys.writes(head.task_id), field, to_json(write_entry(head))))
    if head.status in UNRESOLVED:
        ops.append(hset(keys.UNRESOLVED, field, unresolved_json(head)))
    else:
        ops.append(Op(OpName.HDEL, key=keys.UNRESOLVED, field=field))
    return ops


def write_entry(head: r.EvidenceHead) -> r.WriteIndexEntry:
    return r.WriteIndexEntry(
        evidence_id=head.evidence_id,
        status=head.status,
        business_ok=head.business_ok,
        not_before=head.not_before,
    )


class Unresolved(msgspec.Struct, frozen=True, rename="camel"):
    """Value of ``unresolved``: where the head of a write with an unknown outcome lies."""

    evidence_id: str
    task_id: str
    node_id: str
    status: CallStatus


def unresolved_json(head: r.EvidenceHead) -> str:
    return to_json(
        Unresolved(
            evidence_id=head.evidence_id, task_id=head.task_id, node_id=head.node_id, status=head.status
        )
    )


def settlement_ops(settlement: r.Settlement, *, payload_in_redis: bool) -> list[Op]:
    """The head first; the payload apart, in Redis only up to its limit (D18)."""
    ops = evidence_ops(settlement.evidence)
    if payload_in_redis and settlement.payload_json:
        head = settlement.evidence
        ops.append(
            Op(
                OpName.SET,
                key=keys.payload(head.task_id, head.evidence_id),
                value=settlement.payload_json,
            )
        )
        ops.append(dirty(members.payload(head.task_id, head.evidence_id)))
    return ops


# --- the end of a turn ----------------------------------------------------------------------------


def prepare_ops(turn: r.TurnRef, outcome: r.Run, closing: list[r.TurnEvent]) -> list[Op]:
    """Outcome and closing events, durable in Redis in the same step as the last changes."""
    stored = Outcome(run=outcome, closing_events=closing, version=turn.version)
    return [
        outbox(members.commit(turn.run_id), to_json(stored)),
        Op(OpName.SET, key=keys.run(turn.run_id), value=to_json(outcome)),
        *[event_op(turn.run_id, event) for event in closing],
    ]


def given_up_ops(run_id: str, outcome: r.Run, closing: list[r.TurnEvent]) -> list[Op]:
    """The end of a run that was never prepared: it goes to its row, no ``turn_commit`` with it."""
    stored = Outcome(run=outcome, closing_events=closing)
    return [
        outbox(members.run(run_id), to_json(stored)),
        Op(OpName.SET, key=keys.run(run_id), value=to_json(outcome)),
        *[event_op(run_id, event) for event in closing],
    ]

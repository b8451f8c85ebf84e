"""Rehydration: records from SQL → the operations that write them back (state document 4 ②, 5.2).

A task group comes back as one unit, never key by key (D13); what was there of it is deleted first.
"""

from __future__ import annotations

from collections.abc import Iterable

from state_service.core import keys
from state_service.core.changes import (
    UNRESOLVED,
    Limits,
    hset,
    metadata_ops,
    space_ops,
    unresolved_json,
    write_entry,
)
from state_service.ports import ConversationRows, Op, OpName, TaskRows
from turnfence import records as r
from turnfence.axes import SideEffect
from turnfence.records import to_json

KEPT = frozenset({keys.STATE, keys.KEYS})


def drop_ops(listed: Iterable[str], *, keep_events: bool = True) -> list[Op]:
    """Delete the conversation's hot data, group keys included. Events of runs are no data of the
    conversation: a watcher may still read them."""
    doomed = [key for key in keys.CONVERSATION_KEYS if key not in KEPT]
    doomed += [key for key in sorted(listed) if key.startswith("task:") or not keep_events]
    return [Op(OpName.DEL, key=key) for key in doomed]


def drop_task_ops(listed: Iterable[str], task_id: str) -> list[Op]:
    return [Op(OpName.DEL, key=key) for key in sorted(listed) if keys.is_of_task(key, task_id)]


def conversation_ops(rows: ConversationRows, limits: Limits) -> list[Op]:
    ops = [
        hset(keys.STATE, "activeTaskId", rows.row.active_task_id),
        hset(keys.STATE, "title", rows.row.title),
    ]
    ops += [
        Op(OpName.LPUSH_TRIM, key=keys.DIALOGUE, value=to_json(message), number=limits.dialogue_max)
        for message in rows.dialogue
    ]
    ops += [
        Op(OpName.LPUSH_TRIM, key=keys.RECORDS, value=to_json(record), number=limits.records_max)
        for record in reversed(rows.records)
    ]
    ops += [hset(keys.ENTITIES, key, to_json(entry)) for key, entry in rows.entities.items()]
    ops += [hset(keys.SHARED, name, to_json(value)) for name, value in rows.row.session_shared.items()]
    ops += [
        hset(keys.UNRESOLVED, keys.write_field(head.tool_name, head.idempotency_key), unresolved_json(head))
        for head in rows.unresolved
    ]
    # The heads of unresolved writes of tasks that are not the active one: VERIFY needs them.
    active = rows.task.metadata.task_id if rows.task else ""
    ops += [
        hset(keys.evidence(head.task_id, head.node_id), head.evidence_id, to_json(head))
        for head in rows.unresolved
        if head.task_id != active
    ]
    if rows.task is not None:
        ops += task_ops(rows.task, limits)
    return ops


def task_ops(rows: TaskRows, limits: Limits) -> list[Op]:
    task_id = rows.metadata.task_id
    ops = metadata_ops(rows.metadata)
    ops += [hset(keys.graph(task_id), node.node_id, to_json(node)) for node in rows.nodes]
    if rows.edges:
        ops.append(hset(keys.graph(task_id), keys.EDGES_FIELD, to_json(list(rows.edges))))
    if rows.checkpoint is not None:
        ops.append(Op(OpName.SET, key=keys.checkpoint(task_id), value=to_json(rows.checkpoint)))
    ops += [hset(keys.task_shared(task_id), name, to_json(value)) for name, value in rows.shared.items()]
    if rows.prior is not None:
        ops.append(Op(OpName.SET, key=keys.prior(task_id), value=to_json(rows.prior)))
    for node_id, space in rows.spaces.items():
        ops += space_ops(_as_change(task_id, node_id, space), limits)
    for head in sorted(rows.calls, key=lambda head: head.started_at or 0):
        ops += call_ops(head)
    return ops


def call_ops(head: r.EvidenceHead) -> list[Op]:
    """One evidence head with its indexes, as it is in SQL already: nothing becomes dirty."""
    ops = [hset(keys.evidence(head.task_id, head.node_id), head.evidence_id, to_json(head))]
    if head.side_effect is SideEffect.WRITE and head.idempotency_key:
        field = keys.write_field(head.tool_name, head.idempotency_key)
        ops.append(hset(keys.writes(head.task_id), field, to_json(write_entry(head))))
        if head.status in UNRESOLVED:
            ops.append(hset(keys.UNRESOLVED, field, unresolved_json(head)))
    return ops


def _as_change(task_id: str, node_id: str, space: r.NodeSpace) -> r.PutNodeSpace:
    return r.PutNodeSpace(
        task_id=task_id,
        node_id=node_id,
        inputs=space.inputs,
        outputs=space.outputs,
        state=space.state,
        rounds=space.rounds,
        tokens=space.tokens,
        actions=space.actions,
    )

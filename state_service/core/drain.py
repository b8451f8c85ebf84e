"""Persist's middle part: dirty members → what to read → one batch for SQL → what to clean after.

The same drain serves a turn's own end and the recovery of one that died (design: state.md). It reads
values after the data sequence it will clean up to, so a member that changes meanwhile stays dirty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from state_service.core import hot, keys, members
from state_service.core.changes import Limits, Outcome, Unresolved
from state_service.core.hot import HotTask, decode
from state_service.ports import Op, OpName, PersistBatch, Read, RunEnd
from turnfence import records as r
from turnfence.axes import IntentType, NodeStatus, ReleaseOutcome, TaskStatus
from turnfence.records import to_json

TERMINAL_TASKS = frozenset({TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELED})


class Pending(msgspec.Struct, frozen=True):
    """First read: what is dirty, and everything whose bytes wait in the outbox."""

    state: dict[str, str]
    dirty: dict[str, int]
    outbox: dict[str, str]
    shared: dict[str, r.Sourced]
    listed: frozenset[str]
    unresolved: tuple[Unresolved, ...]

    @property
    def data_version(self) -> int:
        return int(self.state.get("dataVersion") or 0)

    @property
    def data_seq(self) -> int:
        return int(self.state.get("dataSeq") or 0)

    @property
    def stamp(self) -> tuple[int, int]:
        return self.data_version, self.data_seq


PENDING_READS = (
    Read("HGETALL", keys.STATE),
    Read("ZRANGE", keys.DIRTY, (0, -1)),
    Read("HGETALL", keys.OUTBOX),
    Read("HGETALL", keys.SHARED),
    Read("SMEMBERS", keys.KEYS),
    Read("HGETALL", keys.UNRESOLVED),
)


def pending(raw: Sequence[Any]) -> Pending:
    state, dirty, outbox, shared, listed, unresolved = raw
    return Pending(
        state=state,
        dirty=dict(dirty),
        outbox=outbox,
        shared=hot.decode_map(shared, r.Sourced),
        listed=frozenset(listed),
        unresolved=tuple(hot.decode_map(unresolved, Unresolved).values()),
    )


class Plan(msgspec.Struct, frozen=True):
    """Which records the dirty members name; the second read follows from it."""

    tasks: tuple[str, ...]
    nodes: tuple[tuple[str, str], ...]
    edge_tasks: frozenset[str]
    checkpoints: frozenset[str]
    checkpoints_gone: tuple[str, ...]
    evidence: tuple[tuple[str, str, str], ...]
    payloads: tuple[tuple[str, str], ...]
    entities: tuple[str, ...]
    entities_gone: tuple[str, ...]


def plan(pending: Pending) -> Plan:
    by_kind: dict[str, list[str]] = {}
    for member in sorted(pending.dirty, key=lambda name: (pending.dirty[name], name)):
        kind, rest = members.split(member)
        by_kind.setdefault(kind, []).append(rest)

    def pairs(kind: str) -> list[list[str]]:
        return [rest.split(":") for rest in by_kind.get(kind, [])]

    nodes = tuple((task_id, node_id) for task_id, node_id in pairs("node"))
    checkpoints = frozenset(by_kind.get("checkpoint", []))
    edge_tasks = frozenset(by_kind.get("edges", []))
    named = {*by_kind.get("task", []), *(task_id for task_id, _ in nodes), *checkpoints, *edge_tasks}
    active = pending.state.get("activeTaskId", "")
    return Plan(
        tasks=tuple(sorted(named | ({active} if active else set()))),
        nodes=nodes,
        edge_tasks=edge_tasks,
        checkpoints=checkpoints,
        checkpoints_gone=tuple(checkpoint_id for _, checkpoint_id in pairs("checkpoint-gone")),
        evidence=tuple((t, n, e) for t, n, e in pairs("evidence")),
        payloads=tuple((t, e) for t, e in pairs("payload")),
        entities=tuple(by_kind.get("entity", [])),
        entities_gone=tuple(by_kind.get("entity-gone", [])),
    )


def value_reads(plan: Plan) -> list[Read]:
    reads: list[Read] = []
    for task_id in plan.tasks:
        reads += hot.task_reads(task_id)
    for task_id, node_id in plan.nodes:
        reads += hot.space_reads(task_id, node_id)
    reads += [Read("HGET", keys.evidence(t, n), (e,)) for t, n, e in plan.evidence]
    reads += [Read("GET", keys.payload(t, e)) for t, e in plan.payloads]
    reads += [Read("HGET", keys.ENTITIES, (key,)) for key in plan.entities]
    return reads


class Values(msgspec.Struct, frozen=True):
    tasks: dict[str, HotTask]
    spaces: dict[tuple[str, str], r.NodeSpace]
    calls: tuple[r.EvidenceHead, ...]
    payloads: dict[str, str]
    entities: dict[str, r.EntityEntry]


def values(plan: Plan, raw: Sequence[Any]) -> Values:
    cursor = iter(raw)
    tasks = {}
    for task_id in plan.tasks:
        task = hot.task([next(cursor) for _ in range(hot.TASK_READS)])
        if task is not None:
            tasks[task_id] = task
    spaces = {}
    for place in plan.nodes:
        fields, actions = next(cursor), next(cursor)
        spaces[place] = hot.node_space(fields, actions)
    heads = [next(cursor) for _ in plan.evidence]
    payloads = {e: text for (_, e), text in zip(plan.payloads, cursor, strict=False) if text}
    entities = {key: text for key, text in zip(plan.entities, cursor, strict=False) if text}
    return Values(
        tasks=tasks,
        spaces={place: space for place, space in spaces.items() if place[0] in tasks},
        calls=tuple(decode(text, r.EvidenceHead) for text in heads if text),
        payloads=payloads,
        entities=hot.decode_map(entities, r.EntityEntry),
    )


def closed_tasks(values: Values) -> dict[str, HotTask]:
    return {t: task for t, task in values.tasks.items() if task.metadata.status in TERMINAL_TASKS}


def active_task_id(pending: Pending, values: Values) -> str:
    """The active task as SQL gets it: never a terminal one (D28), never one that is gone."""
    active = pending.state.get("activeTaskId", "")
    return active if active in values.tasks and active not in closed_tasks(values) else ""


def batch(pending: Pending, plan: Plan, values: Values) -> PersistBatch:
    outbox = _outbox(pending)
    dirty_tasks = {rest for kind, rest in map(members.split, pending.dirty) if kind == "task"}
    dirty_tasks |= set(closed_tasks(values))
    tasks = {t: task for t, task in values.tasks.items() if t in dirty_tasks}
    graph = {(t, node.node_id): node for t, task in values.tasks.items() for node in task.nodes}
    return PersistBatch(
        active_task_id=active_task_id(pending, values),
        data_version=pending.data_version,
        persist_seq=pending.data_seq,
        title=pending.state.get("title") if members.CONVERSATION in pending.dirty else None,
        session_shared=pending.shared if members.CONVERSATION in pending.dirty else None,
        messages=tuple(
            sorted(
                (decode(text, r.DialogueMessage) for text in outbox["message"].values()),
                key=lambda message: (message.version, message.idx),
            )
        ),
        tasks=tuple(task.metadata for task in tasks.values()),
        task_shared={t: task.shared for t, task in tasks.items()},
        priors={t: task.prior for t, task in tasks.items() if task.prior is not None},
        records={t: task.record for t, task in tasks.items() if task.record is not None},
        nodes=tuple((place[0], graph[place]) for place in plan.nodes if place in graph),
        spaces={place: space for place, space in values.spaces.items() if place in graph},
        edges=tuple(
            (t, edge) for t in plan.edge_tasks if t in values.tasks for edge in values.tasks[t].edges
        ),
        checkpoints=_checkpoints(plan, values),
        checkpoints_gone=plan.checkpoints_gone,
        resumes=tuple(decode(text, r.ResumeRecord) for text in outbox["resume"].values()),
        calls=values.calls,
        call_payloads=values.payloads,
        entities={**dict.fromkeys(plan.entities_gone), **values.entities},
        traces=tuple(
            (rest.rpartition(":")[0], decode(text, r.TraceEvent)) for rest, text in outbox["trace"].items()
        ),
        run_ends=(*_ends(outbox["run"], prepared=False), *_ends(outbox["commit"], prepared=True)),
    )


def _outbox(pending: Pending) -> dict[str, dict[str, str]]:
    """Kind → (rest of the member's name → bytes); every kind that is asked for is there."""
    kinds: dict[str, dict[str, str]] = {k: {} for k in ("message", "resume", "trace", "run", "commit")}
    for member, text in pending.outbox.items():
        kind, rest = members.split(member)
        kinds.setdefault(kind, {})[rest] = text
    return kinds


def _checkpoints(plan: Plan, values: Values) -> dict[str, r.TaskCheckpoint]:
    """Open checkpoints of dirty members; one that its task's end closed is not open any more."""
    closed = closed_tasks(values)
    return {
        t: checkpoint
        for t in plan.checkpoints
        if t in values.tasks and t not in closed and (checkpoint := values.tasks[t].checkpoint) is not None
    }


def _ends(stored: Mapping[str, str], *, prepared: bool) -> list[RunEnd]:
    return [run_end(decode(text, Outcome), prepared=prepared) for text in stored.values()]


def run_end(outcome: Outcome, *, prepared: bool) -> RunEnd:
    return RunEnd(
        run=outcome.run,
        closing_events=tuple(outcome.closing_events),
        prepared=prepared,
        published_result=published_result(outcome.run),
    )


def published_result(run: r.Run) -> str:
    """Only DIAGNOSIS + SUCCESS publishes a result for the next turn (lifecycle document 12.2)."""
    if run.intent is not IntentType.DIAGNOSIS or run.release_outcome is not ReleaseOutcome.SUCCESS:
        return ""
    if run.answer is None or not isinstance(run.answer.body, r.DiagnosisReport):
        return ""
    return to_json(run.answer.body)


# --- after the commit -----------------------------------------------------------------------------


class Expiries(msgspec.Struct, frozen=True):
    """The short time-outs that begin once everything is in SQL (milliseconds)."""

    suspended_ms: int
    sentinel_gap_ms: int
    payload_done_ms: int
    events_ms: int


def close_ops(
    pending: Pending, values: Values, ends: Sequence[RunEnd], limits: Limits, expiries: Expiries
) -> list[Op]:
    """Clean what was drained, file closed tasks as records and delete their groups, let the rest
    expire. Members that changed since keep their mark, and then nothing of theirs is deleted. The heads of
    writes of unknown outcome stay: VERIFY needs them after their task, too."""
    ops: list[Op] = []
    closed = closed_tasks(values)
    kept = {keys.evidence(write.task_id, write.node_id) for write in pending.unresolved}
    for task_id, task in closed.items():
        if task.record is not None:
            ops.append(
                Op(OpName.LPUSH_TRIM, key=keys.RECORDS, value=to_json(task.record), number=limits.records_max)
            )
        ops += [
            Op(OpName.DEL, key=key) for key in sorted(pending.listed - kept) if keys.is_of_task(key, task_id)
        ]
    if pending.state.get("activeTaskId") in closed:
        ops.append(Op(OpName.HSET, key=keys.STATE, field="activeTaskId", value=""))
    ops += [Op(OpName.CLEAN, field=member, number=pending.data_seq) for member in sorted(pending.dirty)]
    for end in ends:
        ops += ended_run_ops(end.run.run_id, expiries.events_ms)
    return ops + _expiry_ops(pending, values, expiries, closed)


def ended_run_ops(run_id: str, ms: int) -> list[Op]:
    """What a watcher may still want stays for a while. It is listed no more: else the list would grow with
    every turn; a deletion finds it by the rows of recent runs."""
    both = (keys.events(run_id), keys.run(run_id))
    return [Op(name, key=key, number=ms) for key in both for name in (OpName.EXPIRE, OpName.UNLIST)]


def _expiry_ops(
    pending: Pending, values: Values, expiries: Expiries, closed: Mapping[str, HotTask]
) -> list[Op]:
    ops: list[Op] = []
    for task_id, task in values.tasks.items():
        if task_id in closed:
            continue
        group = [key for key in sorted(pending.listed) if keys.is_of_task(key, task_id)]
        if task.metadata.status is TaskStatus.SUSPENDED:
            ops += [Op(OpName.EXPIRE, key=key, number=expiries.suspended_ms) for key in group]
            sentinel = expiries.suspended_ms - expiries.sentinel_gap_ms
            ops.append(Op(OpName.EXPIRE, key=keys.metadata(task_id), number=sentinel))
        ops += _payload_ops(task_id, task, group, values, expiries)
    return ops


def _payload_ops(
    task_id: str, task: HotTask, group: list[str], values: Values, expiries: Expiries
) -> list[Op]:
    """Payloads of DONE nodes go early, unless a downstream node may still read them."""
    if any(node.status not in _PAST for node in task.nodes):
        return []
    doomed = [key for key in group if key.startswith(f"task:{task_id}:payload:")]
    if expiries.payload_done_ms == 0:
        return [Op(OpName.DEL, key=key) for key in doomed]
    return [Op(OpName.EXPIRE, key=key, number=expiries.payload_done_ms) for key in doomed]


_PAST = frozenset({NodeStatus.DONE, NodeStatus.SKIPPED, NodeStatus.FAILED, NodeStatus.CANCELLED})


def finish_ops() -> list[Op]:
    """The turn ended cleanly: the owner mark goes, the lock is freed."""
    return [Op(OpName.HSET, key=keys.STATE, field="lastTraceId", value=""), Op(OpName.UNLOCK)]

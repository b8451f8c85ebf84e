"""What a begin finds and mends (B3–B5): stale or lost hot data, an unfinished predecessor, what
S1–S3 left in SQL, and everything that a dead turn left half done."""

from __future__ import annotations

import msgspec

from state_service.conversation import persist
from state_service.conversation.stores import Stores, scope_of, written
from state_service.core import hot, interrupted, keys, normalise, restore
from state_service.core.changes import dirty as dirty_op
from state_service.core.changes import evidence_ops, hset, message_ops
from state_service.core.members import node as node_member
from state_service.ports import Claim, Op, OpName, Read, RunEnd, TaskRows
from turnfence import records as r
from turnfence.axes import CallStatus
from turnfence.errors import Reason, TurnfenceError
from turnfence.records import to_json


class View(msgspec.Struct, frozen=True):
    """The hot set as it was read: conversation, active task, heads of unresolved writes, rounds of
    the node that asked."""

    conversation: hot.HotConversation
    task: hot.HotTask | None
    open_heads: tuple[r.EvidenceHead, ...]
    rounds: dict[str, int]


class Recovered(msgspec.Struct, frozen=True):
    """``ops`` put the view right; ``messages``, ``nodes`` and ``heads`` are what they change in it."""

    view: View
    ops: tuple[Op, ...]
    messages: tuple[r.DialogueMessage, ...]
    nodes: tuple[r.TaskNode, ...]
    heads: tuple[r.EvidenceHead, ...]
    recovery: r.Recovery


async def recover(stores: Stores, turn: r.TurnRef, claim: Claim, *, stale_owner: str) -> Recovered:
    """Bring the conversation into a state the turn can start from; idempotent."""
    rehydrated: list[str] = []
    view = await _read(stores, turn)
    if _is_stale(view.conversation, claim):
        rehydrated += await _rehydrate_all(stores, turn, view.conversation)
        view = await _read(stores, turn)
    drained = await _drain_predecessor(stores, turn, view.conversation)
    if drained.seen:
        view = await _read(stores, turn)
    if view.conversation.active_task_id and view.task is None:
        rehydrated += await _rehydrate_task(stores, turn, view.conversation)
        view = await _read(stores, turn)
    ended = await _end_unfinished(stores, turn, claim, drained)
    return await _mend(stores, turn, claim, view, ended, rehydrated, drained.changes)


async def _read(stores: Stores, turn: r.TurnRef) -> View:
    limits = stores.rules.limits
    scope = scope_of(turn)
    conversation = hot.conversation(
        await stores.hot.read(scope, hot.conversation_reads(limits.dialogue_max, limits.records_max))
    )
    task_id = conversation.active_task_id
    heads = list(conversation.unresolved.values())
    reads = hot.task_reads(task_id) if task_id else []
    reads += [Read("HGET", keys.evidence(u.task_id, u.node_id), (u.evidence_id,)) for u in heads]
    raw = await stores.hot.read(scope, reads) if reads else []
    task = hot.task(raw[: hot.TASK_READS]) if task_id else None
    texts = raw[hot.TASK_READS :] if task_id else raw
    asking = task.checkpoint.node_id if task is not None and task.checkpoint is not None else ""
    rounds: dict[str, int] = {}
    if asking:
        (text,) = await stores.hot.read(scope, [Read("HGET", keys.space(task_id, asking), ("rounds",))])
        rounds[asking] = int(text or 0)
    return View(
        conversation=conversation,
        task=task,
        open_heads=tuple(hot.decode(text, r.EvidenceHead) for text in texts if text),
        rounds=rounds,
    )


# --- loss -----------------------------------------------------------------------------------------


def _is_stale(conversation: hot.HotConversation, claim: Claim) -> bool:
    """A hot set older than what SQL persisted is dropped whole (D3): a Redis that went back in time
    must not lend its old data a new version. No hot data and nothing persisted: a new conversation."""
    persisted = (claim.row.state_version, claim.row.persist_seq) if claim.row is not None else (0, 0)
    return conversation.stamp < persisted


async def _rehydrate_all(stores: Stores, turn: r.TurnRef, conversation: hot.HotConversation) -> list[str]:
    limits = stores.rules.limits
    rows = await stores.cold.load_conversation(
        scope_of(turn), dialogue_max=limits.dialogue_max, records_max=limits.records_max
    )
    if rows is None:
        raise TurnfenceError(Reason.STATE_WRITE_FAILED, detail="the claimed conversation row is gone")
    ops = [*restore.drop_ops(conversation.listed), *restore.conversation_ops(rows, limits)]
    written(
        await stores.hot.apply(
            turn,
            ops,
            ttl_ms=stores.rules.ttl_ms,
            now_ms=stores.clock.now_ms(),
            stamp=conversation.stamp,
            base_seq=rows.row.persist_seq,
        )
    )
    return ["conversation", *([f"task:{rows.task.metadata.task_id}"] if rows.task else [])]


async def _rehydrate_task(stores: Stores, turn: r.TurnRef, conversation: hot.HotConversation) -> list[str]:
    task_id = conversation.active_task_id
    rows: TaskRows | None = await stores.cold.load_task(scope_of(turn), task_id)
    ops = restore.drop_task_ops(conversation.listed, task_id)
    if rows is None:
        # A task that SQL never saw cannot come back: the conversation goes on without it.
        ops.append(hset(keys.STATE, "activeTaskId", ""))
    else:
        ops += restore.task_ops(rows, stores.rules.limits)
    written(
        await stores.hot.apply(
            turn,
            ops,
            ttl_ms=stores.rules.ttl_ms,
            now_ms=stores.clock.now_ms(),
            stamp=conversation.stamp,
        )
    )
    return [f"task:{task_id}"]


# --- a predecessor that did not finish ------------------------------------------------------------


class Drained(msgspec.Struct, frozen=True):
    """``seen``: there was something to bring to SQL. ``finished``: runs whose recorded end it held."""

    seen: bool
    changes: int = 0
    finished: frozenset[str] = frozenset()


async def _drain_predecessor(stores: Stores, turn: r.TurnRef, conversation: hot.HotConversation) -> Drained:
    """First bring to SQL what it had flushed and prepared: what a user was shown is never missing."""
    if not conversation.dirty:
        return Drained(seen=False)
    done = await persist.drain(stores, turn)
    return Drained(
        seen=True,
        changes=len(done.pending.dirty),
        finished=frozenset(end.run.run_id for end in done.batch.run_ends),
    )


async def _end_unfinished(stores: Stores, turn: r.TurnRef, claim: Claim, drained: Drained) -> list[str]:
    """Every RUNNING run below our version that left no recorded end becomes FAILED / INTERRUPTED."""
    unfinished = [run_id for run_id in claim.unfinished if run_id not in drained.finished]
    if not unfinished:
        return []
    scope = scope_of(turn)
    now = stores.clock.now_ms()
    reads = [Read("GET", keys.run(run_id)) for run_id in unfinished]
    reads += [Read("XRANGE", keys.events(run_id)) for run_id in unfinished]
    raw = await stores.hot.read(scope, reads)
    ends, ops = [], []
    for run_id, live, events in zip(unfinished, raw, raw[len(unfinished) :], strict=False):
        known = hot.decode(live, r.Run) if live else r.Run(run_id=run_id)
        run = interrupted.ended(msgspec.structs.replace(known, conversation_id=scope.conversation_id), now)
        last = events[-1][0] if events else 0
        closing = interrupted.closing_events(run, last, now)
        ends.append(RunEnd(run=run, closing_events=tuple(closing), prepared=False))
        ops += [
            Op(OpName.XADD, key=keys.events(run_id), field=str(event.sequence), value=to_json(event))
            for event in closing
        ]
        ops.append(Op(OpName.SET, key=keys.run(run_id), value=to_json(run)))
    await stores.cold.end_runs(scope, ends)
    written(await stores.hot.apply(turn, ops, ttl_ms=stores.rules.ttl_ms, now_ms=stores.clock.now_ms()))
    return unfinished


# --- what is left -----------------------------------------------------------------------------------


async def _mend(
    stores: Stores,
    turn: r.TurnRef,
    claim: Claim,
    view: View,
    ended: list[str],
    rehydrated: list[str],
    changes: int,
) -> Recovered:
    if ended:
        view = await _read(stores, turn)
    ops: list[Op] = []
    messages = _missing_messages(claim, view)
    for message in messages:
        ops += message_ops(message, stores.rules.limits)
    heads = {head.evidence_id: head for head in view.open_heads}
    merged = await _merge_calls(stores, turn, claim)
    for head in merged:
        heads[head.evidence_id] = head
        ops += evidence_ops(head)
    unknown: list[str] = []
    cancelled: list[str] = []
    for head in list(heads.values()):
        changed = normalise.head(head, turn.run_id)
        if changed is not None:
            heads[head.evidence_id] = changed
            ops += evidence_ops(changed)
            (unknown if changed.status is CallStatus.UNKNOWN else cancelled).append(head.evidence_id)
    nodes: list[r.TaskNode] = []
    if view.task is not None:
        task_id = view.task.metadata.task_id
        nodes = normalise.nodes(view.task.nodes, view.task.edges)
        for node in nodes:
            ops.append(hset(keys.graph(task_id), node.node_id, to_json(node)))
            ops.append(dirty_op(node_member(task_id, node.node_id)))
    ops += _renewals(view, stores.rules.ttl_ms)
    return Recovered(
        view=view,
        ops=tuple(ops),
        messages=tuple(messages),
        nodes=tuple(nodes),
        heads=tuple(heads.values()),
        recovery=r.Recovery(
            ended_runs=ended,
            nodes_reset=[node.node_id for node in nodes],
            evidence_unknown=unknown,
            evidence_cancelled=cancelled,
            rehydrated=rehydrated,
            recovered_changes=changes,
        ),
    )


def _missing_messages(claim: Claim, view: View) -> list[r.DialogueMessage]:
    known = {message.message_id for message in view.conversation.dialogue}
    return [message for message in claim.messages if message.message_id not in known]


async def _merge_calls(stores: Stores, turn: r.TurnRef, claim: Claim) -> list[r.EvidenceHead]:
    """Calls that SQL knows better than Redis (D41); a settled state wins, whichever side has it."""
    calls = [row.head for row in claim.calls]
    if not calls:
        return []
    raw = await stores.hot.read(
        scope_of(turn),
        [Read("HGET", keys.evidence(c.task_id, c.node_id), (c.evidence_id,)) for c in calls],
    )
    return [
        call
        for call, text in zip(calls, raw, strict=True)
        if normalise.settled_wins(hot.decode(text, r.EvidenceHead) if text else None, call)
    ]


def _renewals(view: View, ttl_ms: int) -> list[Op]:
    """Every key lives as long as a running turn may need it (D16): one TTL, renewed once a turn."""
    listed = [key for key in sorted(view.conversation.listed) if key.startswith("task:")]
    return [Op(OpName.EXPIRE, key=key, number=ttl_ms) for key in (*keys.CONVERSATION_KEYS, *listed)]


# --- the view as the harness gets it --------------------------------------------------------------


def snapshot(
    turn: r.TurnRef, recovered: Recovered, message: r.DialogueMessage | None, dialogue_max: int
) -> r.Snapshot:
    view = recovered.view
    dialogue = [*view.conversation.dialogue, *recovered.messages]
    if message is not None and all(m.message_id != message.message_id for m in dialogue):
        dialogue.append(message)
    conversation = msgspec.structs.replace(
        hot.snapshot_conversation(turn.conversation_id, view.conversation), version=turn.version
    )
    unresolved = (CallStatus.STARTED, CallStatus.UNKNOWN)
    return r.Snapshot(
        conversation=conversation,
        dialogue=dialogue[-dialogue_max:],
        records=list(view.conversation.records),
        entities=view.conversation.entities,
        shared=view.conversation.shared,
        task=_task_state(view, recovered),
        unresolved_writes=[head for head in recovered.heads if head.status in unresolved],
    )


def _task_state(view: View, recovered: Recovered) -> r.TaskState | None:
    if view.task is None:
        return None
    mended = {node.node_id: node for node in recovered.nodes}
    state = hot.task_state(view.task)
    return msgspec.structs.replace(state, nodes=[mended.get(node.node_id, node) for node in view.task.nodes])

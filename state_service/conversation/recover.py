"""What a begin finds and mends (B3–B5): stale or lost hot data, an unfinished predecessor, what
S1–S3 left in SQL, and everything that a dead turn left half done."""

from __future__ import annotations

import msgspec

from state_service.conversation import persist
from state_service.conversation.stores import Stores, refused, scope_of, written
from state_service.core import hot, interrupted, keys, normalise, restore
from state_service.core.changes import UNRESOLVED, evidence_ops, hset, message_ops
from state_service.core.changes import dirty as dirty_op
from state_service.core.drain import ended_run_ops
from state_service.core.members import node as node_member
from state_service.ports import Claim, Code, Op, OpName, Phase, Read, RunEnd, TaskRows
from turnfence import records as r
from turnfence.axes import CallStatus
from turnfence.errors import Reason, TurnfenceError
from turnfence.records import to_json

Stamp = tuple[int, int]  # (data version, data sequence)
ATTEMPTS = 4  # read again when Redis has less than SQL was just given


class View(msgspec.Struct, frozen=True):
    """The hot set as it was read: conversation, active task, heads of unresolved writes, rounds of
    the node that asked."""

    conversation: hot.HotConversation
    task: hot.HotTask | None
    open_heads: tuple[r.EvidenceHead, ...]
    rounds: dict[str, int]


class Recovered(msgspec.Struct, frozen=True):
    """``known``: the stamp that SQL has by now. ``ops`` put the view right; ``messages``, ``nodes`` and
    ``heads`` are what they change in it."""

    view: View
    known: Stamp
    ops: tuple[Op, ...]
    messages: tuple[r.DialogueMessage, ...]
    nodes: tuple[r.TaskNode, ...]
    heads: tuple[r.EvidenceHead, ...]
    recovery: r.Recovery


async def recover(stores: Stores, turn: r.TurnRef, claim: Claim, known: Stamp) -> Recovered:
    """Bring the conversation into a state the turn can start from; idempotent. ``known``: the stamp that SQL
    has; the turn starts from no less, or raises STATE_LOST."""
    rehydrated: list[str] = []
    drained = Drained()
    for _ in range(ATTEMPTS):
        view = await _read(stores, turn)
        if view.conversation.stamp < known:
            rehydrated += await _rehydrate_all(stores, turn, view.conversation)
            view = await _read(stores, turn)
        if view.conversation.dirty:
            drained = drained.then(await _drain_predecessor(stores, turn))
            known = max(known, drained.stamp)
            view = await _read(stores, turn)
        if view.conversation.stamp >= known:
            break
    else:
        raise refused(Code.LOST)  # Redis keeps going back
    if view.conversation.active_task_id and view.task is None:
        rehydrated += await _rehydrate_task(stores, turn, view.conversation)
        view = await _read(stores, turn)
    ended = await _end_unfinished(stores, turn, claim, drained.finished)
    if ended:
        view = await _read(stores, turn)
    mended = await _mend(stores, turn, claim, view)
    recovery = msgspec.structs.replace(
        mended.recovery, ended_runs=ended, rehydrated=rehydrated, recovered_changes=drained.changes
    )
    return msgspec.structs.replace(mended, recovery=recovery, known=known)


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


def persisted(claim: Claim) -> Stamp:
    """What SQL has. A hot set that is older is dropped whole (D3): a Redis that went back in time must not
    lend its old data a new version. No hot data and nothing persisted: a new conversation."""
    return (claim.row.state_version, claim.row.persist_seq) if claim.row is not None else (0, 0)


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
            phase=Phase.BEGIN,
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
            phase=Phase.RECOVERY,
        )
    )
    return [f"task:{task_id}"]


# --- a predecessor that did not finish ------------------------------------------------------------


class Drained(msgspec.Struct, frozen=True):
    """What was brought to SQL. ``finished``: runs whose recorded end it held."""

    stamp: Stamp = (0, 0)
    changes: int = 0
    finished: frozenset[str] = frozenset()

    def then(self, later: Drained) -> Drained:
        changes, finished = self.changes + later.changes, self.finished | later.finished
        return Drained(stamp=later.stamp, changes=changes, finished=finished)


async def _drain_predecessor(stores: Stores, turn: r.TurnRef) -> Drained:
    """First bring to SQL what it had flushed and prepared: what a user was shown is never missing."""
    done = await persist.drain(stores, turn)
    return Drained(
        stamp=done.pending.stamp,
        changes=len(done.pending.dirty),
        finished=frozenset(end.run.run_id for end in done.batch.run_ends),
    )


async def _end_unfinished(
    stores: Stores, turn: r.TurnRef, claim: Claim, finished: frozenset[str]
) -> list[str]:
    """Every RUNNING run below our version that left no recorded end becomes FAILED / INTERRUPTED."""
    unfinished = [run_id for run_id in claim.unfinished if run_id not in finished]
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
        ops += ended_run_ops(run_id, stores.rules.expiries.events_ms)
    if not await stores.cold.interrupt(turn, ends):
        raise refused(Code.FENCED)
    written(
        await stores.hot.apply(
            turn,
            ops,
            ttl_ms=stores.rules.ttl_ms,
            now_ms=stores.clock.now_ms(),
            phase=Phase.RECOVERY,
        )
    )
    return unfinished


# --- what is left -----------------------------------------------------------------------------------


async def _mend(stores: Stores, turn: r.TurnRef, claim: Claim, view: View) -> Recovered:
    ops: list[Op] = []
    messages = _missing_messages(claim, view, stores.rules.limits.dialogue_max)
    for message in messages:
        ops += message_ops(message, stores.rules.limits)
    heads = {head.evidence_id: head for head in view.open_heads}
    merged = await _merge_calls(stores, turn, claim, view)
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
        known=view.conversation.stamp,
        ops=tuple(ops),
        messages=tuple(messages),
        nodes=tuple(nodes),
        heads=tuple(heads.values()),
        recovery=r.Recovery(
            nodes_reset=[node.node_id for node in nodes],
            evidence_unknown=unknown,
            evidence_cancelled=cancelled,
        ),
    )


def _missing_messages(claim: Claim, view: View, dialogue_max: int) -> list[r.DialogueMessage]:
    """Those that SQL alone has. What is older than a full window has left it, and is not missing."""
    window = view.conversation.dialogue
    known = {message.message_id for message in window}
    oldest = (window[0].version, window[0].idx) if len(window) >= dialogue_max else (0, 0)
    return [m for m in claim.messages if m.message_id not in known and (m.version, m.idx) > oldest]


async def _merge_calls(stores: Stores, turn: r.TurnRef, claim: Claim, view: View) -> list[r.EvidenceHead]:
    """Calls that SQL knows better than Redis (D41); a settled state wins, whichever side has it. A call that
    Redis holds open is looked up however old it is; one that the last persist knew as settled matters to its
    own task only, and to none that is closed."""
    since = claim.row.state_version if claim.row is not None else 0
    known = {row.head.evidence_id: row.head for row in claim.calls}
    held = {head.evidence_id for head in view.open_heads}
    held |= {row.head.evidence_id for row in claim.calls if row.version > since}
    asked = [head.evidence_id for head in view.open_heads if head.evidence_id not in known]
    if asked:
        known |= {head.evidence_id: head for head in await stores.cold.calls(scope_of(turn), asked)}
    active = view.conversation.active_task_id
    calls = [
        head
        for head in known.values()
        if head.status in UNRESOLVED or head.evidence_id in held or (active and head.task_id == active)
    ]
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

"""What the hot store holds, read back into records: which keys to read, and how to understand them."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from state_service.core import keys
from state_service.core.changes import Unresolved
from state_service.ports import Read, StoreCorrupt
from turnfence import records as r
from turnfence.axes import TaskStatus

T = TypeVar("T")


class HotConversation(msgspec.Struct, frozen=True):
    """The conversation layer; ``dialogue`` oldest first, ``records`` newest first."""

    state: dict[str, str]
    dialogue: tuple[r.DialogueMessage, ...]
    records: tuple[r.TaskRecord, ...]
    entities: dict[str, r.EntityEntry]
    shared: dict[str, r.Sourced]
    unresolved: dict[str, Unresolved]
    dirty: dict[str, int]
    listed: frozenset[str]

    @property
    def stamp(self) -> tuple[int, int]:
        """(dataVersion, dataSeq); (0, 0) when there is no hot data."""
        return int(self.state.get("dataVersion") or 0), int(self.state.get("dataSeq") or 0)

    @property
    def active_task_id(self) -> str:
        return self.state.get("activeTaskId", "")


class HotTask(msgspec.Struct, frozen=True):
    """One task group. ``record``: the TaskRecord that the close carried, if it was closed."""

    metadata: r.TaskMetadata
    nodes: tuple[r.TaskNode, ...]
    edges: tuple[r.TaskEdge, ...]
    checkpoint: r.TaskCheckpoint | None
    shared: dict[str, r.Sourced]
    prior: r.Prior | None
    writes: dict[str, r.WriteIndexEntry]
    record: r.TaskRecord | None = None


def decode(text: str, kind: type[T]) -> T:
    """Stored JSON as a record; another shape is corruption, never a default (D90)."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(f"a stored {getattr(kind, '__name__', kind)} has another shape") from error


def decode_map(hash_: dict[str, str], kind: type[T]) -> dict[str, T]:
    return {field: decode(value, kind) for field, value in hash_.items()}


def conversation_reads(dialogue_max: int, records_max: int) -> list[Read]:
    return [
        Read("HGETALL", keys.STATE),
        Read("LRANGE", keys.DIALOGUE, (0, dialogue_max - 1)),
        Read("LRANGE", keys.RECORDS, (0, records_max - 1)),
        Read("HGETALL", keys.ENTITIES),
        Read("HGETALL", keys.SHARED),
        Read("HGETALL", keys.UNRESOLVED),
        Read("ZRANGE", keys.DIRTY, (0, -1)),
        Read("SMEMBERS", keys.KEYS),
    ]


def conversation(raw: list[Any]) -> HotConversation:
    state, dialogue, records, entities, shared, unresolved, dirty, listed = raw
    return HotConversation(
        state=state,
        dialogue=tuple(decode(text, r.DialogueMessage) for text in reversed(dialogue)),
        records=tuple(decode(text, r.TaskRecord) for text in records),
        entities=decode_map(entities, r.EntityEntry),
        shared=decode_map(shared, r.Sourced),
        unresolved=decode_map(unresolved, Unresolved),
        dirty=dict(dirty),
        listed=frozenset(listed),
    )


TASK_READS = 6


def task_reads(task_id: str) -> list[Read]:
    return [
        Read("HGETALL", keys.metadata(task_id)),
        Read("HGETALL", keys.graph(task_id)),
        Read("GET", keys.checkpoint(task_id)),
        Read("HGETALL", keys.task_shared(task_id)),
        Read("GET", keys.prior(task_id)),
        Read("HGETALL", keys.writes(task_id)),
    ]


def task(raw: list[Any]) -> HotTask | None:
    """None when the sentinel is gone: then the whole group counts as gone."""
    metadata, graph, checkpoint, shared, prior, writes = raw
    if not metadata:
        return None
    edges = graph.get(keys.EDGES_FIELD)
    return HotTask(
        metadata=task_metadata(metadata),
        nodes=tuple(
            decode(text, r.TaskNode) for node_id, text in graph.items() if node_id != keys.EDGES_FIELD
        ),
        edges=tuple(decode(edges, list[r.TaskEdge])) if edges else (),
        checkpoint=decode(checkpoint, r.TaskCheckpoint) if checkpoint else None,
        shared=decode_map(shared, r.Sourced),
        prior=decode(prior, r.Prior) if prior else None,
        writes=decode_map(writes, r.WriteIndexEntry),
        record=decode(metadata["record"], r.TaskRecord) if metadata.get("record") else None,
    )


_INTEGERS = frozenset({"suspendedAt", "startedAt", "finishedAt"})


def task_metadata(hash_: dict[str, str]) -> r.TaskMetadata:
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(r.TaskMetadata):
        text = hash_.get(field.encode_name, "")
        if field.encode_name in _INTEGERS:
            values[field.name] = int(text) if text else None
        elif field.name == "status":
            values[field.name] = TaskStatus(text)
        else:
            values[field.name] = text
    return r.TaskMetadata(**values)


def space_reads(task_id: str, node_id: str) -> list[Read]:
    return [
        Read("HGETALL", keys.space(task_id, node_id)),
        Read("LRANGE", keys.actions(task_id, node_id), (0, -1)),
    ]


def node_space(hash_: dict[str, str], actions: list[str]) -> r.NodeSpace:
    """Fields ``inputs.<name>``, ``outputs.<name>``, ``state.<name>``; actions oldest first."""
    parts: dict[str, dict[str, str]] = {"inputs": {}, "outputs": {}, "state": {}}
    for field, value in hash_.items():
        part, dot, name = field.partition(".")
        if dot and part in parts:
            parts[part][name] = value
    return r.NodeSpace(
        inputs=decode_map(parts["inputs"], r.Sourced),
        outputs=decode_map(parts["outputs"], r.Sourced),
        state=parts["state"],
        rounds=int(hash_.get("rounds") or 0),
        tokens=int(hash_.get("tokens") or 0),
        actions=[decode(text, r.NodeAction) for text in reversed(actions)],
    )


def snapshot_conversation(scope_id: str, hot: HotConversation) -> r.Conversation:
    state = hot.state
    return r.Conversation(
        conversation_id=scope_id,
        user_id=state.get("userId", ""),
        active_task_id=state.get("activeTaskId", ""),
        version=int(state.get("version") or 0),
        last_trace_id=state.get("lastTraceId", ""),
        title=state.get("title", ""),
        updated_at=int(state["updatedAt"]) if state.get("updatedAt") else None,
    )


def task_state(task: HotTask) -> r.TaskState:
    return r.TaskState(
        metadata=task.metadata,
        nodes=list(task.nodes),
        edges=list(task.edges),
        checkpoint=task.checkpoint,
        shared=task.shared,
        prior=task.prior,
        writes=task.writes,
    )

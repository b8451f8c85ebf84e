"""Things that turns make: a task with a node, its checkpoints, and the evidence of its calls."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.contract.turns import NOW, Talk, Turn, hash_of, new_id
from turnfence import records as r
from turnfence.axes import (
    CallStatus,
    CheckpointType,
    EdgeType,
    NodeStatus,
    ResumeAction,
    SideEffect,
    SourceType,
    TaskStatus,
)


class Work:
    """A task with one node, and the changes that open it."""

    def __init__(self) -> None:
        self.task_id = new_id()
        self.node_id = "n1"

    def task(self, **changed: Any) -> r.TaskMetadata:
        task = r.TaskMetadata(
            task_id=self.task_id,
            status=TaskStatus.RUNNING,
            current_node_id=self.node_id,
            agent_id="ops",
            goal_summary="restart it",
            request="restart the web server",
            started_at=NOW,
        )
        return msgspec.structs.replace(task, **changed)

    def node(self, node_id: str = "", **changed: Any) -> r.TaskNode:
        node = r.TaskNode(node_id=node_id or self.node_id, title="look", status=NodeStatus.RUNNING)
        return msgspec.structs.replace(node, **changed)

    def edge(self, from_node_id: str, to_node_id: str, kind: EdgeType = EdgeType.NORMAL) -> r.TaskEdge:
        return r.TaskEdge(from_node_id=from_node_id, to_node_id=to_node_id, type=kind)

    def note(self, text: str, name: str = "note") -> r.PutNodeSpace:
        """A note in the node's space, as one JSON document."""
        return r.PutNodeSpace(
            task_id=self.task_id, node_id=self.node_id, state={name: msgspec.json.encode(text).decode()}
        )

    def opened(self, **task: Any) -> list[r.StateChange]:
        return [
            r.PutConversation(active_task_id=self.task_id),
            r.PutTask(task=self.task(**task)),
            r.PutNode(task_id=self.task_id, node=self.node()),
        ]

    def suspended(self) -> list[r.StateChange]:
        """The node is done for this turn: nothing for the next begin to mend."""
        return [
            r.PutTask(task=self.task(status=TaskStatus.SUSPENDED, suspended_at=NOW)),
            r.PutNode(task_id=self.task_id, node=self.node(status=NodeStatus.SUSPENDED)),
        ]

    def closed(self, status: TaskStatus = TaskStatus.SUCCEEDED, closed_at: int = NOW) -> r.CloseTask:
        record = r.TaskRecord(
            task_id=self.task_id,
            agent_id="ops",
            status=status,
            goal="restart it",
            summary="it was restarted",
            closed_at=closed_at,
        )
        return r.CloseTask(
            task_id=self.task_id, status=status, record=record, final_message="done", closed_at=closed_at
        )

    def approval(self, args_hash: str, **changed: Any) -> r.TaskCheckpoint:
        checkpoint = r.TaskCheckpoint(
            checkpoint_id=new_id(),
            type=CheckpointType.APPROVAL,
            node_id=self.node_id,
            question="Restart web-1?",
            allowed_actions=[ResumeAction.CONFIRM, ResumeAction.REJECT],
            pending_action=r.PendingAction(
                tool_name="restart", args_json='{"host":"web-1"}', args_hash=args_hash
            ),
            created_at=NOW,
        )
        return msgspec.structs.replace(checkpoint, **changed)

    def write(self, turn: Turn, **changed: Any) -> r.EvidenceHead:
        """A write as it is registered: STARTED."""
        head = r.EvidenceHead(
            evidence_id=new_id(),
            task_id=self.task_id,
            node_id=self.node_id,
            tool_name="restart",
            side_effect=SideEffect.WRITE,
            status=CallStatus.STARTED,
            idempotency_key=hash_of("web-1"),
            args_hash=hash_of('{"host":"web-1"}'),
            round=1,
            trace_id=turn.run_id,
            started_at=NOW,
        )
        return msgspec.structs.replace(head, **changed)

    def read(self, turn: Turn, **changed: Any) -> r.EvidenceHead:
        """What a read tool found."""
        head = r.EvidenceHead(
            evidence_id=new_id(),
            task_id=self.task_id,
            node_id=self.node_id,
            tool_name="uptime",
            side_effect=SideEffect.NONE,
            status=CallStatus.SUCCESS,
            business_ok=True,
            empty=False,
            args_hash=hash_of("{}"),
            round=1,
            trace_id=turn.run_id,
            started_at=NOW,
            finished_at=NOW + 5,
            duration=5,
        )
        return msgspec.structs.replace(head, **changed)


def done(head: r.EvidenceHead, **changed: Any) -> r.EvidenceHead:
    """A write that had its effect."""
    given = {"status": CallStatus.SUCCESS, "business_ok": True, "finished_at": NOW + 9, "duration": 9}
    return msgspec.structs.replace(head, **(given | changed))


def ended(head: r.EvidenceHead, status: CallStatus, **changed: Any) -> r.EvidenceHead:
    """A call that ended in another way than by its effect."""
    return msgspec.structs.replace(head, status=status, finished_at=NOW + 9, **changed)


async def at_work(talk: Talk, **given: Any) -> tuple[Turn, Work]:
    """A turn with an open task."""
    turn, work = await talk.begin(**given), Work()
    await turn.flush(*work.opened())
    return turn, work


async def heads_of(turn: Turn, work: Work) -> dict[str, r.EvidenceHead]:
    """The evidence of the task's node, by its id."""
    opened = await turn.open_node(work.task_id, work.node_id)
    return {head.evidence_id: head for head in opened.evidence}


async def next_turn(turn: Turn, work: Work) -> Turn:
    """The turn ends with its task suspended, and another begins."""
    await turn.persist(*work.suspended())
    return await turn.talk.begin("go on")


def sourced(value_json: str, kind: SourceType = SourceType.MODEL, ref: str = "") -> r.Sourced:
    return r.Sourced(value_json=value_json, source=r.Source(type=kind, ref=ref))

"""Records with no field at its default, and the commit of everything that there is."""

from __future__ import annotations

from typing import Any

import msgspec

from state_service.ports import ConversationRow, ConversationRows, PersistBatch, RunEnd, TaskRows
from tests.contract.turns import NOW, hash_of, new_id
from tests.state.sql_bench import AWKWARD, Story, batch, message, run_of, write_head
from turnfence import records as r
from turnfence.axes import (
    CallStatus,
    CheckpointType,
    CollectionState,
    EdgeType,
    FailureKind,
    FallbackType,
    NodeStatus,
    ResumeAction,
    SemanticVerdict,
    SideEffect,
    SourceType,
    StopReason,
    StreamState,
    TaskStatus,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
)

SOURCED = r.Sourced(
    value_json='{"b": 1.0, "a": 10000000000000000000000, "文": "😀"}',
    source=r.Source(type=SourceType.EVIDENCE, ref="e1", path="$.a[0]"),
)
ENTITY = r.EntityEntry(
    display_name=AWKWARD, attrs_json='{"z": 1e3, "a": 0.10}', task_id="t1", evidence_id="e1", seen_at=NOW
)


def entity(**changed: Any) -> r.EntityEntry:
    return msgspec.structs.replace(ENTITY, mentions=2, **changed)


def record(task_id: str = "t1") -> r.TaskRecord:
    return r.TaskRecord(
        task_id=task_id,
        agent_id="ops",
        status=TaskStatus.SUCCEEDED,
        goal=AWKWARD,
        summary=AWKWARD,
        entities={"host:web-1": entity()},
        artifacts=[r.ArtifactRef(evidence_id="e1", name="log", bytes=9)],
        closed_at=NOW,
    )


def task(**changed: Any) -> r.TaskMetadata:
    whole = r.TaskMetadata(
        task_id="t1",
        status=TaskStatus.SUSPENDED,
        current_node_id="n1",
        agent_id="ops",
        goal_summary=AWKWARD,
        request=AWKWARD,
        final_message=AWKWARD,
        suspended_at=NOW,
        started_at=NOW + 1,
        finished_at=NOW + 2,
        trace_id="r1",
        source_message_id="m1",
    )
    return msgspec.structs.replace(whole, **changed)


NODE = r.TaskNode(
    node_id="n1",
    title=AWKWARD,
    objective=AWKWARD,
    skill_key="查询.look",
    target="主机 1",
    target_claimed=True,
    result=AWKWARD,
    status=NodeStatus.FAILED,
    depends_on=["n0", "nn"],
    error_code="E1",
    error_message=AWKWARD,
    delegate_depth=2,
    started_at=NOW,
    finished_at=NOW + 1,
)
SPACE = r.NodeSpace(
    inputs={"a": SOURCED},
    outputs={"b": SOURCED},
    state={"plan": f'"{"x" * 9}"'},
    rounds=3,
    tokens=4,
    actions=[
        r.NodeAction(
            round=1, kind="BUILTIN", name="note", arguments_brief=AWKWARD, result_brief=AWKWARD, at=NOW
        )
    ],
)
EDGE = r.TaskEdge(from_node_id="n0", to_node_id="n1", type=EdgeType.DELEGATE)
PRIOR = r.Prior(
    tasks=[record("t0")],
    entities={"host:web-1": entity()},
    artifacts=[r.ArtifactRef(evidence_id="e0", name="log", bytes=8)],
    reason="FOLLOW",
)


def checkpoint(**changed: Any) -> r.TaskCheckpoint:
    asked = r.TaskCheckpoint(
        checkpoint_id=new_id(),
        type=CheckpointType.APPROVAL,
        node_id="n1",
        question=AWKWARD,
        allowed_actions=[ResumeAction.CONFIRM, ResumeAction.REJECT],
        suggestions=[AWKWARD],
        expected_fields=["host"],
        pending_action=r.PendingAction(tool_name="restart", args_json='{"a":1.0}', args_hash=hash_of("a")),
        fields=[r.ShownField(label="主机", value=AWKWARD, path="$.host")],
        evidence_id="e1",
        created_at=NOW,
        expires_at=NOW + 9,
    )
    return msgspec.structs.replace(asked, **changed)


def full_head(turn: r.TurnRef, **changed: Any) -> r.EvidenceHead:
    """No field at its default."""
    head = r.EvidenceHead(
        evidence_id=new_id(),
        task_id="t1",
        node_id="n1",
        tool_name="重启.restart",
        side_effect=SideEffect.WRITE,
        status=CallStatus.SUCCESS,
        business_ok=True,
        empty=False,
        extract_counts={"hosts": 3, AWKWARD: 0},
        failure_kind=FailureKind.BUSINESS_FAILURE,
        idempotency_key=hash_of("web-1"),
        args_hash=hash_of("{}"),
        args_brief=AWKWARD,
        result_brief=AWKWARD,
        error_code="E1",
        entities=AWKWARD,
        payload_id=new_id(),
        payload_bytes=9,
        round=4,
        trace_id=turn.run_id,
        detail=AWKWARD,
        artifact=True,
        started_at=NOW,
        finished_at=NOW + 1,
        duration=0,
        not_before=NOW + 2,
        call_id="call_1",
    )
    return msgspec.structs.replace(head, **changed)


def trace(sequence: int, **changed: Any) -> r.TraceEvent:
    event = r.TraceEvent(
        sequence=sequence,
        type=TraceEventType.TOOL_INVOCATION,
        phase=TracePhase.TOOL,
        status=TraceEventStatus.SUCCEEDED,
        started_at=NOW,
        duration=5,
        node_id="n1",
        evidence_id="e1",
        attributes={"why": AWKWARD},
    )
    return msgspec.structs.replace(event, **changed)


def full_run(turn: r.TurnRef, **changed: Any) -> r.Run:
    """No field at its default, but for what other tables say."""
    report = r.DiagnosisReport(
        conclusion=AWKWARD,
        facts=[r.Fact(text=AWKWARD, evidence_ids=["e1"])],
        evidence=[r.EvidenceCitation(evidence_id="e1", tool_name="uptime")],
        recommendations=[AWKWARD],
    )
    given: dict[str, Any] = {
        "task_id": "t1",
        "query_cut": True,
        "error_code": "E1",
        "fallback_type": FallbackType.INSUFFICIENT_EVIDENCE,
        "stop_reason": StopReason.INFORMATION_SATURATED,
        "collection_state": CollectionState.SATURATED,
        "semantic_verdict": SemanticVerdict.SUPPORTED,
        "stream_state": StreamState.TERMINAL,
        "limits": r.Budget(model_calls=8, tool_calls=9, tokens=10_000, payload_bytes=1, deadline=60_000),
        "usage": r.Usage(model_calls=2, tool_calls=1, prompt_tokens=30, completion_tokens=12, duration=456),
        "started_at": NOW,
        "answer": r.Content(body=report, text=AWKWARD),
    }
    return run_of(turn, **(given | changed))


def whole(story: Story, turn: r.TurnRef) -> PersistBatch:
    """A commit of everything that there is."""
    event = r.TurnEvent(
        sequence=4,
        run_id=turn.run_id,
        conversation_id=turn.conversation_id,
        kind=r.Content(body=r.ChatReply(text=AWKWARD), text=AWKWARD),
        time=NOW,
    )
    said = message(turn, message_id="m1", node_id="")
    head = write_head(turn, evidence_id="e1")
    return batch(
        turn,
        active_task_id="t1",
        title=AWKWARD,
        session_shared={"a": SOURCED},
        messages=(said, message(turn, message_id="m2", idx=0, task_id="", node_id="n1")),
        tasks=(task(),),
        task_shared={"t1": {"a": SOURCED}},
        priors={"t1": PRIOR},
        records={"t1": record()},
        nodes=(("t1", NODE), ("t1", msgspec.structs.replace(NODE, node_id="n0"))),
        spaces={("t1", "n1"): SPACE},
        edges=(("t1", EDGE),),
        checkpoints={"t1": checkpoint(checkpoint_id="c1")},
        resumes=(
            r.ResumeRecord(
                resume_id="r1",
                checkpoint_id="c0",
                message_id="m1",
                action=ResumeAction.CONFIRM,
                task_id="t1",
                acted_at=NOW,
                user_id=story.user_id,
            ),
        ),
        calls=(head, write_head(turn, evidence_id="e2", status=CallStatus.SUCCESS, idempotency_key="")),
        call_payloads={"e2": AWKWARD},
        entities={"host:web-1": entity(), "host:a:b": entity()},
        traces=((turn.run_id, trace(1)), (turn.run_id, trace(2))),
        run_ends=(
            RunEnd(run=full_run(turn), closing_events=(event,), prepared=True, published_result=AWKWARD),
        ),
    )


def expected(story: Story, turn: r.TurnRef, given: PersistBatch) -> ConversationRows:
    calls = {head.evidence_id: head for head in given.calls}
    return ConversationRows(
        row=ConversationRow(
            user_id=story.user_id,
            title=AWKWARD,
            active_task_id="t1",
            session_shared={"a": SOURCED},
            state_version=turn.version,
            persist_seq=7,
            fence_version=turn.version,
            deleted=False,
            fence_trace=turn.run_id,
            updated_at=NOW,
        ),
        dialogue=(given.messages[1], given.messages[0]),
        records=(record(),),
        entities={"host:web-1": entity(), "host:a:b": entity()},
        task=TaskRows(
            metadata=task(),
            nodes=(NODE, msgspec.structs.replace(NODE, node_id="n0")),
            edges=(EDGE,),
            checkpoint=given.checkpoints["t1"],
            shared={"a": SOURCED},
            prior=PRIOR,
            spaces={"n1": SPACE, "n0": r.NodeSpace()},
            calls=(calls["e1"], calls["e2"]),
        ),
        unresolved=(calls["e1"],),
    )


def defaults_of(value: msgspec.Struct) -> list[str]:
    """Fields that say nothing: a record that is to prove a round trip has none."""
    found = []
    for field in msgspec.structs.fields(type(value)):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if default is not msgspec.NODEFAULT and getattr(value, field.name) == default:
            found.append(field.name)
    return found

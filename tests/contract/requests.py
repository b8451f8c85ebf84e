"""A good request of every RPC that is served, with every field set: the start of the tables of bad ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
from google.protobuf.message import Message

from tests.contract.turns import CALL_SECONDS, NOW, StateClient, Turn
from tests.contract.work import Work, done, sourced
from turnfence import records as r
from turnfence.axes import (
    DialogueRole,
    EdgeType,
    MessageType,
    ReleaseOutcome,
    ResumeAction,
    RunState,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
    TurnStatus,
)
from turnfence.codec import to_message
from turnfence.state.v1 import run_service_pb2 as runs_pb2
from turnfence.state.v1 import state_pb2

IDS = {
    *("organ_id", "user_id", "conversation_id", "run_id", "message_id", "agent_id", "task_id", "node_id"),
    *("evidence_id", "checkpoint_id", "current_node_id", "active_task_id", "source_message_id", "trace_id"),
    *("from_node_id", "to_node_id", "lease_token", "entity_type"),
}
NOT_IDS = {("put_entity", "entity_id")}  # a business object's own

Step = str | int


class Rpc(NamedTuple):
    """One RPC: where it is, its request, and how a good one is made."""

    service: str
    name: str
    kind: type[Message]
    streams: bool
    make: Callable[[Turn, Work], msgspec.Struct]

    async def call(self, client: StateClient, request: Message) -> None:
        await self.call_raw(client, request.SerializeToString())

    async def call_raw(self, client: StateClient, data: bytes) -> None:
        path = f"/turnfence.state.v1.{self.service}/{self.name}"
        if not self.streams:
            await client.channel.unary_unary(path)(data, timeout=CALL_SECONDS)
            return
        call: Any = client.channel.unary_stream(path)(data, timeout=CALL_SECONDS)
        try:
            async for _ in call:
                return
        finally:
            call.cancel()


def every_change(work: Work, run_id: str) -> list[r.StateChange]:
    """All kinds but CloseTask, which travels in PersistTurn alone."""
    task, node = work.task_id, work.node_id
    entry = r.EntityEntry(
        display_name="web-1", attrs_json='{"cpu":8}', task_id=task, evidence_id="e1", seen_at=NOW, mentions=2
    )
    artifact = r.ArtifactRef(evidence_id="e1", name="uptime", bytes=2**40)
    record = msgspec.structs.replace(
        work.closed().record, entities={"host:web-1": entry}, artifacts=[artifact]
    )
    message = r.DialogueMessage(
        message_id="m1",
        role=DialogueRole.AGENT,
        type=MessageType.AGENT_REPLY,
        text="looking",
        trace_id=run_id,
        task_id=task,
        node_id=node,
        round=1,
        created_at=NOW,
        release_outcome=ReleaseOutcome.SUCCESS,
    )
    done_event = r.Done(
        release_outcome=ReleaseOutcome.SUCCESS, turn_status=TurnStatus.WAITING, checkpoint_id="c1"
    )
    return [
        r.AppendMessage(message=message),
        r.PutConversation(title="Servers", active_task_id=task),
        r.PutSessionShared(name="zone", value=sourced('"eu"', ref="e1")),
        r.PutTask(task=work.task(trace_id=run_id, source_message_id="m0", suspended_at=NOW)),
        r.PutNode(task_id=task, node=work.node(target="web-1", depends_on=["n2"], error_code="E1")),
        r.PutEdge(task_id=task, edge=r.TaskEdge(from_node_id="n1", to_node_id="n2", type=EdgeType.NORMAL)),
        r.PutCheckpoint(task_id=task, checkpoint=work.approval("a" * 64, evidence_id="e1")),
        r.ConsumeCheckpoint(
            task_id=task,
            checkpoint_id="c1",
            message_id="m0",
            action=ResumeAction.CONFIRM,
            acted_at=NOW,
            user_id="u1",
        ),
        r.PutTaskShared(task_id=task, name="host", value=sourced('"web-1"')),
        r.PutPrior(
            task_id=task,
            prior=r.Prior(
                tasks=[record], entities={"host:web-1": entry}, artifacts=[artifact], reason="same host"
            ),
        ),
        r.PutNodeSpace(
            task_id=task,
            node_id=node,
            inputs={"host": sourced('"web-1"')},
            outputs={"up": sourced("true")},
            state={"note": '"slow"'},
            rounds=2,
            tokens=2**40,
            actions=[r.NodeAction(round=1, kind="BUILTIN", name="ask", at=NOW, call_id="k1")],
        ),
        r.PutEntity(entity_type="host", entity_id="web 1/é", entry=entry),
        r.AppendEvent(
            event=r.TurnEvent(sequence=1, run_id=run_id, conversation_id="c", time=NOW, kind=done_event)
        ),
        r.AppendTrace(
            trace=r.TraceEvent(
                sequence=1,
                type=TraceEventType.TOOL_INVOCATION,
                phase=TracePhase.TOOL,
                status=TraceEventStatus.SUCCEEDED,
                started_at=NOW,
                duration=5,
                node_id=node,
                evidence_id="e1",
                attributes={"tool_name": "uptime"},
            )
        ),
        r.PutRun(
            run=r.Run(
                run_id=run_id,
                conversation_id="c",
                message_id="m0",
                agent_id="ops",
                task_id=task,
                run_state=RunState.RUNNING,
            )
        ),
    ]


def _register(turn: Turn, work: Work) -> r.RegisterWriteRequest:
    return r.RegisterWriteRequest(
        turn=turn.ref,
        task_id=work.task_id,
        node_id=work.node_id,
        evidence=work.write(turn),
        request_json='{"host":"web-1"}',
    )


def _settle(turn: Turn, work: Work) -> r.SettleCallsRequest:
    head = done(work.read(turn))
    settlement = r.Settlement(
        task_id=work.task_id, node_id=work.node_id, evidence=head, payload_json="{}", request_json="{}"
    )
    return r.SettleCallsRequest(turn=turn.ref, settlements=[settlement])


def _persist(turn: Turn, work: Work) -> r.PersistTurnRequest:
    outcome = turn.outcome(task_id=work.task_id)
    return turn.persist_request(turn.reply(), work.closed(), outcome=outcome, closing=turn.closing())


def _abandon(turn: Turn, work: Work) -> r.AbandonTurnRequest:
    return r.AbandonTurnRequest(
        organ_id=turn.ref.organ_id,
        conversation_id=turn.ref.conversation_id,
        run_id=turn.run_id,
        outcome=turn.outcome(run_state=RunState.FAILED),
        closing_events=turn.closing(),
    )


STATE, RUNS = "StateService", "RunService"
RPCS = [
    Rpc(
        STATE,
        "BeginTurn",
        state_pb2.BeginTurnRequest,
        False,
        lambda turn, work: turn.talk.request(
            message_id=turn.request.input.message_id, agent_id="ops", checkpoint_id="c1"
        ),
    ),
    Rpc(
        STATE,
        "OpenNode",
        state_pb2.OpenNodeRequest,
        False,
        lambda turn, work: r.OpenNodeRequest(turn=turn.ref, task_id=work.task_id, node_id=work.node_id),
    ),
    Rpc(
        STATE,
        "Flush",
        state_pb2.FlushRequest,
        False,
        lambda turn, work: r.FlushRequest(
            turn=turn.ref, sequence=turn.sequence, changes=every_change(work, turn.run_id)
        ),
    ),
    Rpc(STATE, "RegisterWrite", state_pb2.RegisterWriteRequest, False, _register),
    Rpc(STATE, "SettleCalls", state_pb2.SettleCallsRequest, False, _settle),
    Rpc(STATE, "PersistTurn", state_pb2.PersistTurnRequest, False, _persist),
    Rpc(
        STATE,
        "RenewLease",
        state_pb2.RenewLeaseRequest,
        False,
        lambda turn, work: r.RenewLeaseRequest(turn=turn.ref),
    ),
    Rpc(STATE, "AbandonTurn", state_pb2.AbandonTurnRequest, False, _abandon),
    Rpc(
        RUNS,
        "GetRun",
        runs_pb2.GetRunRequest,
        False,
        lambda turn, work: r.GetRunRequest(
            organ_id=turn.ref.organ_id, user_id=turn.talk.user_id, run_id=turn.run_id
        ),
    ),
    Rpc(
        STATE,
        "ReadPayload",
        state_pb2.ReadPayloadRequest,
        True,
        lambda turn, work: r.ReadPayloadRequest(turn=turn.ref, task_id=work.task_id, evidence_id="e1"),
    ),
    Rpc(
        RUNS,
        "WatchEvents",
        runs_pb2.WatchEventsRequest,
        True,
        lambda turn, work: r.WatchEventsRequest(
            organ_id=turn.ref.organ_id, user_id=turn.talk.user_id, run_id=turn.run_id
        ),
    ),
]
REQUESTS = {rpc.name: rpc for rpc in RPCS}


def valid(rpc: Rpc, turn: Turn, work: Work) -> Any:
    return to_message(rpc.make(turn, work), rpc.kind)


def id_places(message: Message, above: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    """Where a request holds an id, deep inside too."""
    for field in message.DESCRIPTOR.fields:
        here = (*above, field.name)
        if field.message_type is None:
            if field.name in IDS and here[-2:] not in NOT_IDS and getattr(message, field.name):
                yield here
        elif field.message_type.GetOptions().map_entry:
            continue
        elif field.is_repeated:
            for place, item in enumerate(getattr(message, field.name)):
                yield from id_places(item, (*here, place))
        elif message.HasField(field.name):
            yield from id_places(getattr(message, field.name), here)


def at(message: Any, steps: tuple[Step, ...]) -> Any:
    for step in steps:
        message = message[step] if isinstance(step, int) else getattr(message, step)
    return message

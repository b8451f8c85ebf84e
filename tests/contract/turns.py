"""The state service as its caller sees it: typed records over a real channel, and small stories of turns.

``StateClient`` sends one call and returns its record or raises the ``TurnfenceError`` that the service
answered. ``Talk`` is a conversation with fresh random ids, ``Turn`` a turn of it: it counts its flushes and
carries the data sequence that it was told, as a harness does.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

import grpc
import msgspec
import pytest
from google.protobuf.message import Message

from harness_service.adapters.state_session import StateSession
from turnfence import records as r
from turnfence.axes import (
    DialogueRole,
    IntentType,
    MessageType,
    ReleaseOutcome,
    ResumeAction,
    RunState,
    StreamState,
    TerminationReason,
    TurnMode,
    TurnStatus,
)
from turnfence.codec import from_message, to_message
from turnfence.errors import Reason, TurnfenceError
from turnfence.rpc_errors import from_rpc_error
from turnfence.state.v1 import run_service_pb2 as runs_pb2
from turnfence.state.v1 import run_service_pb2_grpc, state_pb2, state_pb2_grpc

R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")

CALL_SECONDS = 20.0
LONG_LEASE = 60_000  # a slow machine must not end a turn that the test means to be alive
SHORT_LEASE = 200  # of a turn whose process "dies"
MESSAGE_BYTES = 16 * 1024 * 1024
NOW = 1_700_000_000_123  # epoch milliseconds; a plain instant with a fraction of a second


def new_id() -> str:
    return secrets.token_hex(16)


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class StateClient:
    """One channel to a state service."""

    def __init__(self, target: str, *, by_session: bool = False) -> None:
        size = [("grpc.max_receive_message_length", MESSAGE_BYTES), ("grpc.max_send_message_length", -1)]
        quick = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
        self.channel: Any = grpc.aio.insecure_channel(target, options=[*size, *quick])
        self.state: Any = state_pb2_grpc.StateServiceStub(self.channel)
        self.runs: Any = run_service_pb2_grpc.RunServiceStub(self.channel)
        self._session = StateSession(self.state.Session) if by_session else None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self.channel.close()

    async def _write(self, name: str, message: Message, kind: type[R]) -> R:
        """A call of the write path, by its name in a session."""
        if self._session is not None:
            return from_message(await self._session.call(name, message, CALL_SECONDS), kind)
        return await answer(getattr(self.state, name.title().replace("_", "")), message, kind)

    async def begin(self, request: r.BeginTurnRequest) -> r.BeginTurnResponse:
        message = to_message(request, state_pb2.BeginTurnRequest)
        return await self._write("begin_turn", message, r.BeginTurnResponse)

    async def open_node(self, request: r.OpenNodeRequest) -> r.OpenNodeResponse:
        message = to_message(request, state_pb2.OpenNodeRequest)
        return await self._write("open_node", message, r.OpenNodeResponse)

    async def flush(self, request: r.FlushRequest) -> r.FlushResponse:
        message = to_message(request, state_pb2.FlushRequest)
        return await self._write("flush", message, r.FlushResponse)

    async def register(self, request: r.RegisterWriteRequest) -> r.RegisterWriteResponse:
        message = to_message(request, state_pb2.RegisterWriteRequest)
        return await self._write("register_write", message, r.RegisterWriteResponse)

    async def settle(self, request: r.SettleCallsRequest) -> r.SettleCallsResponse:
        message = to_message(request, state_pb2.SettleCallsRequest)
        return await self._write("settle_calls", message, r.SettleCallsResponse)

    async def read_payload(self, request: r.ReadPayloadRequest) -> list[state_pb2.ReadPayloadResponse]:
        message = to_message(request, state_pb2.ReadPayloadRequest)
        return [piece async for piece in answers(self.state.ReadPayload, message)]

    async def persist(self, request: r.PersistTurnRequest) -> r.PersistTurnResponse:
        message = to_message(request, state_pb2.PersistTurnRequest)
        return await self._write("persist_turn", message, r.PersistTurnResponse)

    async def renew(self, turn: r.TurnRef) -> r.RenewLeaseResponse:
        message = to_message(r.RenewLeaseRequest(turn=turn), state_pb2.RenewLeaseRequest)
        return await self._write("renew_lease", message, r.RenewLeaseResponse)

    async def abandon(self, request: r.AbandonTurnRequest) -> r.AbandonTurnResponse:
        message = to_message(request, state_pb2.AbandonTurnRequest)
        return await self._write("abandon_turn", message, r.AbandonTurnResponse)

    async def get_run(self, organ_id: str, user_id: str, run_id: str) -> r.Run:
        message = runs_pb2.GetRunRequest(organ_id=organ_id, user_id=user_id, run_id=run_id)
        return (await answer(self.runs.GetRun, message, r.GetRunResponse)).run

    async def watch(self, request: r.WatchEventsRequest) -> AsyncIterator[r.TurnEvent | r.Run]:
        message = to_message(request, runs_pb2.WatchEventsRequest)
        async for response in answers(self.runs.WatchEvents, message):
            if response.WhichOneof("item") == "event":
                yield from_message(response.event, r.TurnEvent)
            else:
                yield from_message(response.ended, r.Run)


async def answer(rpc: Any, message: Message, kind: type[R]) -> R:
    """A unary call's record. Raises the ``TurnfenceError`` that the service answered."""
    try:
        return from_message(await rpc(message, timeout=CALL_SECONDS), kind)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def answers(rpc: Any, message: Message) -> AsyncIterator[Any]:
    call = rpc(message, timeout=CALL_SECONDS)
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()


async def refused(call: Awaitable[object], reason: Reason) -> TurnfenceError:
    """The error that a call must end with."""
    with pytest.raises(TurnfenceError) as caught:
        await call
    assert caught.value.reason is reason, caught.value
    return caught.value


# --- conversations and turns ----------------------------------------------------------------------


class Talk:
    """A conversation that nobody else knows."""

    def __init__(self, client: StateClient, *, organ_id: str = "", conversation_id: str = "") -> None:
        self.client = client
        self.organ_id = organ_id or new_id()
        self.user_id = new_id()
        self.conversation_id = conversation_id or new_id()

    def request(
        self,
        text: str = "hello",
        *,
        run_id: str = "",
        message_id: str = "",
        user_id: str = "",
        input_hash: str = "",
        agent_id: str = "",
        action: ResumeAction | None = None,
        checkpoint_id: str = "",
        lease: int | None = LONG_LEASE,
    ) -> r.BeginTurnRequest:
        return r.BeginTurnRequest(
            organ_id=self.organ_id,
            user_id=user_id or self.user_id,
            conversation_id=self.conversation_id,
            run_id=run_id or new_id(),
            input=r.TurnInput(
                message_id=message_id or new_id(), text=text, action=action, checkpoint_id=checkpoint_id
            ),
            input_hash=input_hash or hash_of(text),
            agent_id=agent_id,
            lease=lease,
        )

    async def begin(self, text: str = "hello", **given: Any) -> Turn:
        """A turn that has begun; raises what the service answers instead."""
        return await self.begin_by(self.request(text, **given))

    async def begin_by(self, request: r.BeginTurnRequest) -> Turn:
        begun = await self.client.begin(request)
        assert begun.existing_run is None, "the message is known already"
        return Turn(self, request, begun)

    async def begin_after_lease(self, text: str = "hello", **given: Any) -> Turn:
        """A turn after one whose process died: waits for its lease."""
        request = self.request(text, **given)
        return Turn(self, request, await self.begin_when_free(request))

    async def begin_when_free(self, request: r.BeginTurnRequest) -> r.BeginTurnResponse:
        """Repeats the call while the conversation is busy, as RetryInfo says."""
        async with asyncio.timeout(CALL_SECONDS):
            while True:
                try:
                    return await self.client.begin(request)
                except TurnfenceError as error:
                    if error.reason is not Reason.CONVERSATION_BUSY or error.retry_after is None:
                        raise
                    await asyncio.sleep(error.retry_after)

    async def turn(self, text: str = "hello", *changes: r.StateChange, **given: Any) -> Turn:
        """A whole turn: begun and persisted."""
        turn = await self.begin(text, **given)
        await turn.persist(*changes)
        return turn

    async def get_run(self, run_id: str, *, user_id: str = "") -> r.Run:
        return await self.client.get_run(self.organ_id, user_id or self.user_id, run_id)

    def watch(self, run_id: str, after: int = 0, *, user_id: str = "") -> AsyncIterator[r.TurnEvent | r.Run]:
        return self.client.watch(
            r.WatchEventsRequest(
                organ_id=self.organ_id,
                user_id=user_id or self.user_id,
                run_id=run_id,
                after_sequence=after,
            )
        )


class Turn:
    """A turn that has begun. ``ref`` is what its writes carry; ``sequence`` is that of the next flush."""

    def __init__(self, talk: Talk, request: r.BeginTurnRequest, begun: r.BeginTurnResponse) -> None:
        assert begun.turn is not None
        assert begun.snapshot is not None
        self.talk = talk
        self.client = talk.client
        self.request = request
        self.begun = begun
        self.ref: r.TurnRef = begun.turn
        self.snapshot: r.Snapshot = begun.snapshot
        self.sequence = 1
        self.last_event = 0

    @property
    def run_id(self) -> str:
        return self.ref.run_id

    @property
    def task(self) -> r.TaskState:
        assert self.snapshot.task is not None
        return self.snapshot.task

    def saw(self, data_seq: int) -> None:
        self.ref = msgspec.structs.replace(self.ref, seen_seq=max(self.ref.seen_seq, data_seq))

    async def flush(self, *changes: r.StateChange, sequence: int | None = None) -> r.FlushResponse:
        asked = self.sequence if sequence is None else sequence
        done = await self.client.flush(r.FlushRequest(turn=self.ref, sequence=asked, changes=list(changes)))
        self.saw(done.data_seq)
        self.sequence = max(self.sequence, asked + 1)
        return done

    async def open_node(self, task_id: str, node_id: str) -> r.OpenNodeResponse:
        return await self.client.open_node(r.OpenNodeRequest(turn=self.ref, task_id=task_id, node_id=node_id))

    async def register(
        self, head: r.EvidenceHead, request_json: str = "{}", consume: r.ConsumeCheckpoint | None = None
    ) -> r.RegisterWriteResponse:
        registered = await self.client.register(
            r.RegisterWriteRequest(
                turn=self.ref,
                task_id=head.task_id,
                node_id=head.node_id,
                evidence=head,
                request_json=request_json,
                consume_checkpoint=consume,
            )
        )
        self.saw(registered.data_seq)
        return registered

    async def settle(
        self, head: r.EvidenceHead, payload_json: str = "", request_json: str = ""
    ) -> r.EvidenceHead:
        (stored,) = (
            await self.settle_all(
                r.Settlement(
                    task_id=head.task_id,
                    node_id=head.node_id,
                    evidence=head,
                    payload_json=payload_json,
                    request_json=request_json,
                )
            )
        ).evidence
        return stored

    async def settle_all(self, *settlements: r.Settlement) -> r.SettleCallsResponse:
        done = await self.client.settle(r.SettleCallsRequest(turn=self.ref, settlements=list(settlements)))
        self.saw(done.data_seq)
        return done

    async def read_payload(self, task_id: str, evidence_id: str) -> bytes:
        pieces = await self.client.read_payload(
            r.ReadPayloadRequest(turn=self.ref, task_id=task_id, evidence_id=evidence_id)
        )
        return b"".join(piece.chunk for piece in pieces)

    def persist_request(
        self,
        *changes: r.StateChange,
        outcome: r.Run | None = None,
        closing: Sequence[r.TurnEvent] | None = None,
    ) -> r.PersistTurnRequest:
        return r.PersistTurnRequest(
            turn=self.ref,
            sequence=self.sequence,
            changes=list(changes),
            outcome=outcome or self.outcome(),
            closing_events=list(self.closing() if closing is None else closing),
        )

    async def persist(self, *changes: r.StateChange, **given: Any) -> r.PersistTurnResponse:
        return await self.client.persist(self.persist_request(*changes, **given))

    async def renew(self) -> r.RenewLeaseResponse:
        return await self.client.renew(self.ref)

    async def abandon(self, **changed: Any) -> r.AbandonTurnResponse:
        given_up = {
            "run_state": RunState.CANCELLED,
            "termination_reason": TerminationReason.USER_REQUESTED,
            "release_outcome": ReleaseOutcome.CANCELLED,
            "turn_status": TurnStatus.CANCELLED,
            "answer": None,
        }
        return await self.client.abandon(
            r.AbandonTurnRequest(
                organ_id=self.ref.organ_id,
                conversation_id=self.ref.conversation_id,
                run_id=self.run_id,
                outcome=self.outcome(**(given_up | changed)),
            )
        )

    # --- what such a turn says of itself ---

    def outcome(self, **changed: Any) -> r.Run:
        run = r.Run(
            run_id=self.run_id,
            conversation_id=self.ref.conversation_id,
            message_id=self.request.input.message_id,
            agent_id="ops",
            version=self.ref.version,
            intent=IntentType.SYSTEM_CHAT,
            turn_mode=TurnMode.REPLY_ONLY,
            run_state=RunState.SUCCESS,
            termination_reason=TerminationReason.COMPLETED,
            release_outcome=ReleaseOutcome.SUCCESS,
            stream_state=StreamState.TERMINAL,
            turn_status=TurnStatus.DONE,
            limits=r.Budget(model_calls=8, tool_calls=9, tokens=10_000, deadline=60_000),
            usage=r.Usage(model_calls=2, tool_calls=1, prompt_tokens=30, completion_tokens=12, duration=456),
            started_at=NOW,
            finished_at=NOW + 456,
            answer=r.Content(body=r.ChatReply(text="Good day."), text="Good day."),
        )
        return msgspec.structs.replace(run, **changed)

    def event(self, kind: r.EventKind, sequence: int | None = None) -> r.TurnEvent:
        """The next event of the turn's stream."""
        self.last_event = self.last_event + 1 if sequence is None else sequence
        return r.TurnEvent(
            sequence=self.last_event,
            run_id=self.run_id,
            conversation_id=self.ref.conversation_id,
            time=NOW,
            kind=kind,
        )

    def closing(self) -> list[r.TurnEvent]:
        content = r.Content(body=r.ChatReply(text="Good day."), text="Good day.")
        done = r.Done(release_outcome=ReleaseOutcome.SUCCESS, turn_status=TurnStatus.DONE)
        return [self.event(content), self.event(done)]

    def reply(self, text: str = "Good day.", **given: Any) -> r.AppendMessage:
        message = r.DialogueMessage(
            message_id=new_id(),
            role=DialogueRole.AGENT,
            type=MessageType.AGENT_REPLY,
            text=text,
            trace_id=self.run_id,
            created_at=NOW,
        )
        return r.AppendMessage(message=msgspec.structs.replace(message, **given))


async def collect(items: AsyncIterator[T]) -> list[T]:
    return [item async for item in items]

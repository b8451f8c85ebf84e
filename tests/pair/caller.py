"""A caller of HarnessService over a real channel: typed events in, and what a turn came to."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import pytest

from turnfence import records as r
from turnfence.axes import (
    FailureReason,
    FallbackType,
    ReleaseOutcome,
    ResumeAction,
    TurnStatus,
)
from turnfence.codec import from_message
from turnfence.common.v1 import axes_pb2, run_pb2
from turnfence.errors import Reason, TurnfenceError
from turnfence.harness.v1 import harness_pb2 as pb
from turnfence.harness.v1 import harness_pb2_grpc
from turnfence.rpc_errors import from_rpc_error

TURN_SECONDS = 30.0  # of a whole turn; a hang is a failure, not a wait
B = TypeVar("B")


@dataclass
class Heard:
    """The events of one turn, in order, and the error that ended the call, if one did."""

    events: list[r.TurnEvent] = field(default_factory=list)
    error: TurnfenceError | None = None

    def of(self, kind: type[B]) -> list[B]:
        return [event.kind for event in self.events if isinstance(event.kind, kind)]

    @property
    def kinds(self) -> list[str]:
        return [str(event.kind.__struct_config__.tag) for event in self.events]

    @property
    def run_id(self) -> str:
        return self.of(r.Metadata)[0].run_id

    @property
    def conversation_id(self) -> str:
        return self.of(r.Metadata)[0].conversation_id

    @property
    def content(self) -> r.Content:
        (content,) = self.of(r.Content)
        return content

    @property
    def report(self) -> r.DiagnosisReport:
        body = self.content.body
        assert isinstance(body, r.DiagnosisReport), body
        return body

    @property
    def fallback(self) -> FallbackType | None:
        body = self.content.body
        assert isinstance(body, r.Fallback), body
        return body.type

    @property
    def question(self) -> r.CheckpointPrompt:
        body = self.content.body
        assert isinstance(body, r.CheckpointPrompt), body
        return body

    @property
    def done(self) -> r.Done:
        assert self.error is None, self.error
        assert isinstance(self.events[-1].kind, r.Done), self.events[-1]
        return self.events[-1].kind

    @property
    def release(self) -> ReleaseOutcome:
        return self.done.release_outcome

    @property
    def status(self) -> TurnStatus:
        return self.done.turn_status

    @property
    def failure(self) -> FailureReason:
        (failure,) = self.of(r.Failure)
        return failure.reason


def new_id() -> str:
    return secrets.token_hex(8)


class Caller:
    def __init__(self, target: str) -> None:
        quick = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
        self.channel: Any = grpc.aio.insecure_channel(target, options=quick)
        self.stub: Any = harness_pb2_grpc.HarnessServiceStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()

    def call(self, request: pb.RunTurnRequest, timeout: float = TURN_SECONDS) -> Any:
        return self.stub.RunTurn(request, timeout=timeout, wait_for_ready=True)

    async def run(self, request: pb.RunTurnRequest, timeout: float = TURN_SECONDS) -> Heard:
        """A whole turn, to its end or to the error that ended it."""
        heard = Heard()
        try:
            async for event in events_of(self.call(request, timeout)):
                heard.events.append(event)
        except grpc.aio.AioRpcError as error:
            heard.error = from_rpc_error(error)
        return heard

    async def get_run(self, principal: run_pb2.Principal, run_id: str) -> r.Run:
        request = pb.GetRunRequest(principal=principal, run_id=run_id)
        try:
            answer = await self.stub.GetRun(request, timeout=10, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return from_message(answer.run, r.Run)


async def events_of(call: Any) -> AsyncIterator[r.TurnEvent]:
    async for response in call:
        for event in response.events:
            yield from_message(event, r.TurnEvent)


class Conversation:
    """A conversation of a new user; its id is the server's, known after the first turn."""

    def __init__(self, caller: Caller, *, agent_id: str = "reader") -> None:
        self.caller = caller
        self.agent_id = agent_id
        self.principal = run_pb2.Principal(organ_id=new_id(), user_id=new_id())
        self.conversation_id = ""

    def request(self, text: str = "", **given: Any) -> pb.RunTurnRequest:
        fields: dict[str, Any] = {
            "principal": self.principal,
            "conversation_id": self.conversation_id,
            "agent_id": self.agent_id,
            "text": text,
        }
        return pb.RunTurnRequest(**(fields | given))

    async def say(self, text: str = "look at it", **given: Any) -> Heard:
        heard = await self.caller.run(self.request(text, **given))
        if heard.events:
            self.conversation_id = heard.conversation_id
        return heard

    async def act(self, action: ResumeAction, checkpoint_id: str, text: str = "", **given: Any) -> Heard:
        """Answer a checkpoint's question by its button."""
        value = axes_pb2.ResumeAction.Value(f"RESUME_ACTION_{action.name}")
        return await self.say(text, action=value, checkpoint_id=checkpoint_id, **given)

    async def get_run(self, run_id: str) -> r.Run:
        return await self.caller.get_run(self.principal, run_id)


async def refused(caller: Caller, request: pb.RunTurnRequest, reason: Reason) -> TurnfenceError:
    """The error that a turn is refused with before anything of it happened."""
    heard = await caller.run(request)
    assert heard.events == []
    if heard.error is None or heard.error.reason is not reason:
        pytest.fail(f"expected {reason}, got {heard.error!r}")
    return heard.error

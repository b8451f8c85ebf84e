"""What a turn is given and how it speaks: the seam between the story (turn.py) and its owner."""

from __future__ import annotations

from typing import Protocol

import msgspec

from turnfence import records as r
from turnfence.axes import CancelReason, ResumeAction


class TurnRequest(msgspec.Struct, frozen=True):
    """An admitted RunTurn: every field checked, ids made where the caller left them empty."""

    principal: r.Principal
    run_id: str
    conversation_id: str
    message_id: str
    text: str = ""
    agent_id: str = ""
    action: ResumeAction | None = None
    checkpoint_id: str = ""
    budget: r.Budget = r.Budget()
    call_deadline: float | None = None  # seconds left of the gRPC deadline at admission
    locale: str = "en"


class TurnChannel(Protocol):
    """What the owner of a run offers its turn: one door out for events, one door in for cancels."""

    def publish(self, kind: r.EventKind) -> r.TurnEvent:
        """Number an event, pass it through the stream state machine and hand it to the followers.
        Raises ``IllegalEvent`` for one out of order: a programming error, never a user's."""
        ...

    def replay(self, events: list[r.TurnEvent]) -> None:
        """Hand over the recorded events of an ended run instead of running one."""
        ...

    @property
    def cancel_reason(self) -> CancelReason | None:
        """The first reason for which the run was asked to stop, if any."""
        ...

    async def cancelled(self) -> CancelReason:
        """Wait until the run is asked to stop."""
        ...


class Turn(Protocol):
    """The story of one turn. Returns the run as it ended. Before ``metadata`` was published it
    raises ``TurnfenceError`` (the RPC's status); after it, it never raises: a failure is published.
    A run cancelled by USER_REQUESTED publishes no ``done``: its owner ends the stream CANCELLED."""

    async def __call__(self, request: TurnRequest, channel: TurnChannel) -> r.Run: ...

"""The event stream of one run: which event may follow which (lifecycle document 11).

``metadata (status | progress)* (content | failure) done``: one table, through which every event
passes, at the recorder (``StreamSession.emit``) and at a reader's stream (``StreamSession.pass_on``).
Editing rule: a new event kind is a column of ``TRANSITIONS``; what is not in the table is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from turnfence.axes import ReleaseOutcome, StreamState
from turnfence.records import (
    Content,
    Done,
    EventKind,
    Failure,
    Gap,
    Metadata,
    Progress,
    Status,
    TurnEvent,
)


class Position(StrEnum):
    """Where a stream stands; finer than StreamState, which the outside sees."""

    NEW = "NEW"
    OPEN = "OPEN"
    ANSWERED = "ANSWERED"  # content is out, only done may follow
    FAILED = "FAILED"  # failure is out, only done(FAILED) may follow
    TERMINAL = "TERMINAL"
    DISCONNECTED = "DISCONNECTED"


class Signal(StrEnum):
    """An event of the stream, or what happens to its connection."""

    METADATA = "metadata"
    STATUS = "status"
    PROGRESS = "progress"
    CONTENT = "content"
    FAILURE = "failure"
    DONE = "done"
    CANCELLED = "cancelled"  # the call ends with gRPC status CANCELLED, without done
    DISCONNECT = "disconnect"


TRANSITIONS: Mapping[tuple[Position, Signal], Position] = {
    (Position.NEW, Signal.METADATA): Position.OPEN,
    (Position.NEW, Signal.CANCELLED): Position.TERMINAL,
    (Position.NEW, Signal.DISCONNECT): Position.DISCONNECTED,
    (Position.OPEN, Signal.STATUS): Position.OPEN,
    (Position.OPEN, Signal.PROGRESS): Position.OPEN,
    (Position.OPEN, Signal.CONTENT): Position.ANSWERED,
    (Position.OPEN, Signal.FAILURE): Position.FAILED,
    (Position.OPEN, Signal.CANCELLED): Position.TERMINAL,
    (Position.OPEN, Signal.DISCONNECT): Position.DISCONNECTED,
    (Position.ANSWERED, Signal.DONE): Position.TERMINAL,
    (Position.ANSWERED, Signal.DISCONNECT): Position.DISCONNECTED,
    (Position.FAILED, Signal.DONE): Position.TERMINAL,
    (Position.FAILED, Signal.DISCONNECT): Position.DISCONNECTED,
    # Hanging up after the end changes nothing.
    (Position.TERMINAL, Signal.DISCONNECT): Position.TERMINAL,
    (Position.DISCONNECTED, Signal.DISCONNECT): Position.DISCONNECTED,
}

STREAM_STATE: Mapping[Position, StreamState] = {
    Position.NEW: StreamState.NEW,
    Position.OPEN: StreamState.OPEN,
    Position.ANSWERED: StreamState.OPEN,
    Position.FAILED: StreamState.OPEN,
    Position.TERMINAL: StreamState.TERMINAL,
    Position.DISCONNECTED: StreamState.DISCONNECTED,
}

#: What ``done`` may say after content and after failure; CANCELLED is never public.
DONE_OUTCOMES: Mapping[Position, frozenset[ReleaseOutcome]] = {
    Position.ANSWERED: frozenset({ReleaseOutcome.SUCCESS, ReleaseOutcome.FALLBACK}),
    Position.FAILED: frozenset({ReleaseOutcome.FAILED}),
}

_SIGNALS: Mapping[type[EventKind], Signal] = {
    Metadata: Signal.METADATA,
    Status: Signal.STATUS,
    Progress: Signal.PROGRESS,
    Content: Signal.CONTENT,
    Failure: Signal.FAILURE,
    Done: Signal.DONE,
}


class StreamRefused(Exception):
    """This event must not be sent; the stream is as it was before."""

    def __init__(self, position: Position, what: str) -> None:
        super().__init__(f"stream is {position}: {what} refused")
        self.position = position


def transition(position: Position, signal: Signal) -> Position:
    """The next position; StreamRefused for every pair that the table does not have."""
    try:
        return TRANSITIONS[position, signal]
    except KeyError:
        raise StreamRefused(position, signal.value) from None


class StreamSession:
    """One stream of one run. ``after_sequence`` > 0: a reader that has seen the beginning."""

    def __init__(self, run_id: str, conversation_id: str, after_sequence: int = 0) -> None:
        self.run_id = run_id
        self.conversation_id = conversation_id
        self.position = Position.OPEN if after_sequence else Position.NEW
        self.last_sequence = after_sequence

    @property
    def state(self) -> StreamState:
        return STREAM_STATE[self.position]

    def emit(self, kind: EventKind, time_ms: int | None = None) -> TurnEvent:
        """Record the next event: its sequence number is the last one plus one.

        StreamRefused for a late event, a second content, ``done`` with an outcome that does not fit
        what was sent, metadata of another run, and Gap (which only readers get).
        """
        event = TurnEvent(self.last_sequence + 1, self.run_id, self.conversation_id, kind, time_ms)
        self._accept(event)
        return event

    def pass_on(self, event: TurnEvent) -> TurnEvent:
        """Check a recorded event before it goes to a reader, who may miss some but never goes back."""
        if event.run_id != self.run_id or event.conversation_id != self.conversation_id:
            raise StreamRefused(self.position, "an event of another run")
        if event.sequence <= self.last_sequence:
            raise StreamRefused(self.position, f"sequence {event.sequence} after {self.last_sequence}")
        if isinstance(event.kind, Gap):
            self._accept_gap(event.kind)
        else:
            self._accept(event)
        return event

    def end_cancelled(self) -> None:
        """A user's cancel: the call ends with gRPC status CANCELLED, nothing more is sent."""
        self.position = transition(self.position, Signal.CANCELLED)

    def disconnect(self) -> None:
        """The caller is gone or a send failed; after the end this changes nothing."""
        self.position = transition(self.position, Signal.DISCONNECT)

    def _accept(self, event: TurnEvent) -> None:
        kind = event.kind
        if isinstance(kind, Gap):
            raise StreamRefused(self.position, "gap")
        if isinstance(kind, Metadata) and (kind.run_id, kind.conversation_id) != (
            self.run_id,
            self.conversation_id,
        ):
            raise StreamRefused(self.position, "metadata of another run")
        following = transition(self.position, _SIGNALS[type(kind)])
        if isinstance(kind, Done) and kind.release_outcome not in DONE_OUTCOMES[self.position]:
            raise StreamRefused(self.position, f"done({kind.release_outcome})")
        self.position = following
        self.last_sequence = event.sequence

    def _accept_gap(self, gap: Gap) -> None:
        if self.position not in (Position.NEW, Position.OPEN):
            raise StreamRefused(self.position, "gap")
        self.last_sequence = gap.to_sequence
        self.position = Position.OPEN

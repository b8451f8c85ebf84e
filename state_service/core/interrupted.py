"""The end of a run whose process died before it prepared one (wire.md; D68)."""

from __future__ import annotations

import msgspec

from turnfence import records as r
from turnfence.axes import (
    FailureReason,
    ReleaseOutcome,
    RunState,
    StreamState,
    TerminationReason,
    TurnStatus,
)

MESSAGE = "The run was interrupted. Send a new message to try again."


def ended(run: r.Run, now_ms: int) -> r.Run:
    """The run as it counts from now on: FAILED / INTERRUPTED; what it had recorded of itself stays."""
    return msgspec.structs.replace(
        run,
        run_state=RunState.FAILED,
        termination_reason=TerminationReason.INTERRUPTED,
        release_outcome=ReleaseOutcome.FAILED,
        turn_status=TurnStatus.FAILED,
        stream_state=run.stream_state or StreamState.DISCONNECTED,
        durability=None,
        finished_at=now_ms,
        answer=None,
    )


def closing_events(run: r.Run, last_sequence: int, now_ms: int) -> list[r.TurnEvent]:
    """``failure (INTERRUPTED)`` and ``done (FAILED)`` after the last event that was recorded."""

    def event(offset: int, kind: r.EventKind) -> r.TurnEvent:
        return r.TurnEvent(
            sequence=last_sequence + offset,
            run_id=run.run_id,
            conversation_id=run.conversation_id,
            time=now_ms,
            kind=kind,
        )

    return [
        event(1, r.Failure(reason=FailureReason.INTERRUPTED, message=MESSAGE)),
        event(
            2,
            r.Done(
                release_outcome=ReleaseOutcome.FAILED,
                turn_status=TurnStatus.FAILED,
                usage=run.usage,
            ),
        ),
    ]

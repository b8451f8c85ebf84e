"""The run: exactly one end, the first one wins (lifecycle document 3 and 4, D58).

State and reason are set in one step, and the cancel signal is derived from them: there is no second
flag that could disagree. Editing rule: a new way to end a run is a row of ``CANCEL_TO_TERMINATION``
or of ``REASONS_OF_STATE``, never an ``if`` elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec

from turnfence.axes import CancelReason, RunState, TerminationReason


class Termination(msgspec.Struct, frozen=True):
    """How and why a run ended; the pair is never split."""

    state: RunState
    reason: TerminationReason


CANCEL_TO_RUN_STATE: Mapping[CancelReason, RunState] = {
    CancelReason.CLIENT_DISCONNECTED: RunState.CANCELLED,
    CancelReason.USER_REQUESTED: RunState.CANCELLED,
    CancelReason.DEADLINE_EXCEEDED: RunState.TIMED_OUT,
    CancelReason.BUDGET_EXHAUSTED: RunState.BUDGET_EXHAUSTED,
    CancelReason.INTERNAL_FAILURE: RunState.FAILED,
    CancelReason.FENCED: RunState.FAILED,
    CancelReason.SHUTDOWN: RunState.FAILED,
    CancelReason.STATE_UNAVAILABLE: RunState.FAILED,
}

REASONS_OF_STATE: Mapping[RunState, frozenset[TerminationReason]] = {
    RunState.RUNNING: frozenset(),
    RunState.SUCCESS: frozenset({TerminationReason.COMPLETED}),
    RunState.CANCELLED: frozenset({TerminationReason.CLIENT_DISCONNECTED, TerminationReason.USER_REQUESTED}),
    RunState.TIMED_OUT: frozenset({TerminationReason.DEADLINE_EXCEEDED}),
    RunState.BUDGET_EXHAUSTED: frozenset({TerminationReason.BUDGET_EXHAUSTED}),
    RunState.FAILED: frozenset(
        {
            TerminationReason.INTERNAL_FAILURE,
            TerminationReason.MODEL_FAILED,
            TerminationReason.INVALID_DRAFT,
            TerminationReason.FENCED,
            TerminationReason.INTERRUPTED,
            TerminationReason.SHUTDOWN,
            TerminationReason.STATE_UNAVAILABLE,
        }
    ),
}

STATE_OF_REASON: Mapping[TerminationReason, RunState] = {
    reason: state for state, reasons in REASONS_OF_STATE.items() for reason in reasons
}

GRPC_RESERVE_S = 2.0
GRPC_RESERVE_SHARE = 0.1


class RunAborted(Exception):
    """The run has ended: whoever catches this starts nothing new and shows nothing."""

    def __init__(self, termination: Termination) -> None:
        super().__init__(f"run ended: {termination.state} ({termination.reason})")
        self.termination = termination


class RunLifecycle:
    """RUNNING → exactly one terminal pair. Safe to call from any thread.

    ``deadline``: on the caller's monotonic clock, seconds; None: no deadline.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._lock = threading.Lock()
        self._termination: Termination | None = None
        self._listeners: list[Callable[[Termination], object]] = []
        self.deadline = deadline

    @property
    def termination(self) -> Termination | None:
        return self._termination

    @property
    def state(self) -> RunState:
        return self._termination.state if self._termination else RunState.RUNNING

    @property
    def is_active(self) -> bool:
        return self._termination is None

    def finish(self, state: RunState, reason: TerminationReason) -> bool:
        """True for the one call that ended the run. ValueError for a pair that cannot be."""
        if reason not in REASONS_OF_STATE[state]:
            raise ValueError(f"{state} cannot have the reason {reason}")
        termination = Termination(state, reason)
        with self._lock:
            if self._termination is not None:
                return False
            self._termination = termination
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(termination)
        return True

    def succeed(self) -> bool:
        """The application has formed a normal, persistable result (a fallback included)."""
        return self.finish(RunState.SUCCESS, TerminationReason.COMPLETED)

    def fail(self, reason: TerminationReason = TerminationReason.INTERNAL_FAILURE) -> bool:
        return self.finish(RunState.FAILED, reason)

    def end(self, reason: TerminationReason) -> bool:
        """End the run in the state that the reason belongs to."""
        return self.finish(STATE_OF_REASON[reason], reason)

    def cancel(self, reason: CancelReason) -> bool:
        """End the run for an outside reason, mapped by the table of section 4."""
        return self.finish(CANCEL_TO_RUN_STATE[reason], TerminationReason(reason.value))

    def on_end(self, listener: Callable[[Termination], object]) -> Callable[[], None]:
        """Call ``listener`` once, at the end; at once when the run has ended already.

        Returns what takes the listener away again: a run outlives most of what waits for its end.
        """
        with self._lock:
            if self._termination is None:
                self._listeners.append(listener)
                return lambda: self._forget(listener)
            termination = self._termination
        listener(termination)
        return lambda: None

    def _forget(self, listener: Callable[[Termination], object]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def remaining(self, now: float) -> float | None:
        """Seconds to the deadline, never negative; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - now)

    def check_active(self, now: float) -> None:
        """At every boundary: raise ``RunAborted`` when the run has ended, or ends now by its deadline.

        Never called between a write tool's call and its settlement (D48).
        """
        if self.deadline is not None and now >= self.deadline:
            self.cancel(CancelReason.DEADLINE_EXCEEDED)
        if self._termination is not None:
            raise RunAborted(self._termination)


def effective_deadline(
    grpc_remaining_s: float | None, request_deadline_s: float | None, server_max_s: float
) -> float:
    """Seconds that a run may take from now: the earliest of the three, 0 when already past.

    ``grpc_remaining_s`` is reduced by min(2 s, 10 %), for settling and persisting before the caller
    is gone; with on_disconnect = CONTINUE the caller passes None, since its deadline ends only the
    stream. None or 0 as ``request_deadline_s``: the request sets none.
    """
    limits = [server_max_s]
    if grpc_remaining_s is not None:
        reserve = min(GRPC_RESERVE_S, grpc_remaining_s * GRPC_RESERVE_SHARE)
        limits.append(grpc_remaining_s - reserve)
    if request_deadline_s:
        limits.append(request_deadline_s)
    return max(0.0, min(limits))

"""The release decision: the flow chart of the lifecycle document's section 9, its section 10 table,
and the mapping that both documents leave open (reliability design 3.10), as data.

The story asks ``next_step`` again after every answer, until it is a ``ReleaseDecision``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from harness_service.core.run import Termination
from turnfence.axes import (
    FailureReason,
    FallbackType,
    ReleaseOutcome,
    RunState,
    SemanticVerdict,
    TaskStatus,
    TerminationReason,
    TurnStatus,
)


class ReleaseStep(StrEnum):
    """What must still be asked before the release can be decided."""

    EVIDENCE_GUARD = "EVIDENCE_GUARD"
    EVIDENCE_REPAIR = "EVIDENCE_REPAIR"
    EVIDENCE_RECHECK = "EVIDENCE_RECHECK"
    SEMANTIC_GUARD = "SEMANTIC_GUARD"


class ReleaseDecision(msgspec.Struct, frozen=True):
    """``reason``: why a run that fails here fails, for its termination; COMPLETED otherwise."""

    outcome: ReleaseOutcome
    fallback_type: FallbackType | None = None
    reason: TerminationReason = TerminationReason.COMPLETED


class ReleaseFacts(msgspec.Struct, frozen=True):
    """What is known so far; None: not asked yet.

    ``has_draft``: a draft that fits its schema. ``verified_facts``: facts of the draft or of the
    progress snapshot that hold up against their evidence, counted. ``repaired``: whether the one
    repair brought a draft; False: it failed.
    """

    termination: Termination | None
    has_draft: bool
    has_conclusion: bool = False
    verified_facts: int = 0
    missing_info: int = 0
    evidence_valid: bool | None = None
    repaired: bool | None = None
    recheck_valid: bool | None = None
    verdict: SemanticVerdict | None = None


SUCCESS = ReleaseDecision(ReleaseOutcome.SUCCESS)
NO_RESULT = ReleaseDecision(ReleaseOutcome.FAILED, reason=TerminationReason.INVALID_DRAFT)

VERDICTS: Mapping[SemanticVerdict, ReleaseDecision] = {
    SemanticVerdict.SUPPORTED: SUCCESS,
    SemanticVerdict.UNSUPPORTED: ReleaseDecision(ReleaseOutcome.FALLBACK, FallbackType.SEMANTIC_UNSUPPORTED),
    SemanticVerdict.UNAVAILABLE: ReleaseDecision(ReleaseOutcome.FALLBACK, FallbackType.SEMANTIC_UNAVAILABLE),
}

_INSUFFICIENT = ReleaseDecision(ReleaseOutcome.FALLBACK, FallbackType.INSUFFICIENT_EVIDENCE)
_MISSING = ReleaseDecision(ReleaseOutcome.FALLBACK, FallbackType.MISSING_REQUIRED_CONTEXT)
_INVALID_EVIDENCE = ReleaseDecision(ReleaseOutcome.FALLBACK, FallbackType.EVIDENCE_VALIDATION_FAILED)


def next_step(facts: ReleaseFacts) -> ReleaseStep | ReleaseDecision:
    """The next box of the flow chart. Asks nothing of a model once the run has ended (D62, D63)."""
    if facts.termination is not None and facts.termination.state is not RunState.SUCCESS:
        return _of_ended_run(facts.termination, facts.verified_facts)
    if not facts.has_draft:
        return _INSUFFICIENT if facts.verified_facts else NO_RESULT
    if not facts.has_conclusion:
        if facts.verified_facts:
            return _INSUFFICIENT
        return _MISSING if facts.missing_info else NO_RESULT
    return _of_conclusion(facts)


def _of_ended_run(termination: Termination, verified_facts: int) -> ReleaseDecision:
    """Only an exhausted budget may still fall back, on facts alone."""
    if termination.state is RunState.CANCELLED:
        return ReleaseDecision(ReleaseOutcome.CANCELLED, reason=termination.reason)
    if termination.state is RunState.BUDGET_EXHAUSTED and verified_facts:
        return ReleaseDecision(
            ReleaseOutcome.FALLBACK, FallbackType.INSUFFICIENT_EVIDENCE, termination.reason
        )
    return ReleaseDecision(ReleaseOutcome.FAILED, reason=termination.reason)


def _of_conclusion(facts: ReleaseFacts) -> ReleaseStep | ReleaseDecision:
    if facts.evidence_valid is None:
        return ReleaseStep.EVIDENCE_GUARD
    if not facts.evidence_valid:
        if facts.repaired is None:
            return ReleaseStep.EVIDENCE_REPAIR
        if not facts.repaired:
            return _INVALID_EVIDENCE
        if facts.recheck_valid is None:
            return ReleaseStep.EVIDENCE_RECHECK
        if not facts.recheck_valid:
            return _INVALID_EVIDENCE
    if facts.verdict is None:
        return ReleaseStep.SEMANTIC_GUARD
    return VERDICTS[facts.verdict]


# --- what a run's end means on the other axes (3.10, lifecycle 12.2, state 3.4) ---------------------


class RunRowStatus(StrEnum):
    """``diagnosis_run.status``."""

    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class StreamEnd(StrEnum):
    """How the caller's stream ends."""

    CONTENT_DONE = "CONTENT_DONE"
    FAILURE_DONE = "FAILURE_DONE"
    STATUS_CANCELLED = "STATUS_CANCELLED"  # gRPC status, no done
    NONE = "NONE"  # the caller is gone


class RunEnding(msgspec.Struct, frozen=True):
    row_status: RunRowStatus
    stream_end: StreamEnd


ROW_STATUS: Mapping[ReleaseOutcome, RunRowStatus] = {
    ReleaseOutcome.SUCCESS: RunRowStatus.SUCCESS,
    ReleaseOutcome.FALLBACK: RunRowStatus.SUCCESS,
    ReleaseOutcome.FAILED: RunRowStatus.FAILED,
    ReleaseOutcome.CANCELLED: RunRowStatus.CANCELLED,
}

_RELEASED = RunEnding(RunRowStatus.SUCCESS, StreamEnd.CONTENT_DONE)
_FAILED = RunEnding(RunRowStatus.FAILED, StreamEnd.FAILURE_DONE)
_CANCELLED = RunEnding(RunRowStatus.CANCELLED, StreamEnd.STATUS_CANCELLED)

#: Every pair that can be; a pair that is not here is a programming error.
ENDINGS: Mapping[tuple[RunState, ReleaseOutcome], RunEnding] = {
    (RunState.SUCCESS, ReleaseOutcome.SUCCESS): _RELEASED,
    (RunState.SUCCESS, ReleaseOutcome.FALLBACK): _RELEASED,
    (RunState.BUDGET_EXHAUSTED, ReleaseOutcome.FALLBACK): _RELEASED,
    (RunState.BUDGET_EXHAUSTED, ReleaseOutcome.FAILED): _FAILED,
    (RunState.TIMED_OUT, ReleaseOutcome.FAILED): _FAILED,
    (RunState.FAILED, ReleaseOutcome.FAILED): _FAILED,
    (RunState.CANCELLED, ReleaseOutcome.CANCELLED): _CANCELLED,
}

FAILURE_REASONS: Mapping[TerminationReason, FailureReason | None] = {
    TerminationReason.COMPLETED: None,
    TerminationReason.CLIENT_DISCONNECTED: None,
    TerminationReason.USER_REQUESTED: None,
    TerminationReason.DEADLINE_EXCEEDED: FailureReason.TIMED_OUT,
    TerminationReason.BUDGET_EXHAUSTED: FailureReason.BUDGET_EXHAUSTED,
    TerminationReason.INTERNAL_FAILURE: FailureReason.INTERNAL,
    TerminationReason.MODEL_FAILED: FailureReason.MODEL_FAILED,
    TerminationReason.INVALID_DRAFT: FailureReason.INVALID_DRAFT,
    TerminationReason.FENCED: FailureReason.FENCED,
    TerminationReason.INTERRUPTED: FailureReason.INTERRUPTED,
    TerminationReason.SHUTDOWN: FailureReason.INTERRUPTED,
    TerminationReason.STATE_UNAVAILABLE: FailureReason.UNAVAILABLE,
}


def ending_of(termination: Termination, outcome: ReleaseOutcome) -> RunEnding:
    """Run row and stream end of a finished run; ValueError for a pair that cannot be."""
    try:
        ending = ENDINGS[termination.state, outcome]
    except KeyError:
        raise ValueError(f"a run that is {termination.state} cannot release {outcome}") from None
    if termination.reason is TerminationReason.CLIENT_DISCONNECTED:
        return RunEnding(ending.row_status, StreamEnd.NONE)
    return ending


def turn_status(
    state: RunState, outcome: ReleaseOutcome, task: TaskStatus | None, *, task_touched: bool = True
) -> TurnStatus:
    """The one state a client sees: 3.10 with the state document's 3.4.

    ``task``: the active task's status at the end, None without one. ``task_touched``: False for a
    turn that only replied beside a task (then its RUNNING is not this turn's failure).
    """
    if state is RunState.CANCELLED:
        return TurnStatus.CANCELLED
    if outcome is ReleaseOutcome.FAILED:
        return TurnStatus.FAILED
    if task is TaskStatus.SUSPENDED:
        return TurnStatus.WAITING
    if state is RunState.BUDGET_EXHAUSTED:
        return TurnStatus.FAILED
    if task is None or not task_touched:
        return TurnStatus.DONE
    return _TURN_STATUS[task]


_TURN_STATUS: Mapping[TaskStatus, TurnStatus] = {
    TaskStatus.SUCCEEDED: TurnStatus.DONE,
    TaskStatus.SUSPENDED: TurnStatus.WAITING,
    TaskStatus.FAILED: TurnStatus.FAILED,
    TaskStatus.RUNNING: TurnStatus.FAILED,  # nothing may be left running at the end of its turn
    TaskStatus.CANCELED: TurnStatus.CANCELLED,
}

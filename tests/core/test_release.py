"""Lifecycle document 9, 10, 12.2; reliability design 3.10."""

import itertools
from typing import Any

import pytest

from harness_service.core.release import (
    ENDINGS,
    FAILURE_REASONS,
    ROW_STATUS,
    ReleaseDecision,
    ReleaseFacts,
    ReleaseStep,
    RunRowStatus,
    StreamEnd,
    ending_of,
    next_step,
    turn_status,
)
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

O, F, S, V, R = ReleaseOutcome, FallbackType, RunState, SemanticVerdict, TerminationReason  # noqa: E741
TIMED_OUT = Termination(S.TIMED_OUT, R.DEADLINE_EXCEEDED)
BUDGET = Termination(S.BUDGET_EXHAUSTED, R.BUDGET_EXHAUSTED)
BROKEN = Termination(S.FAILED, R.INTERNAL_FAILURE)
GONE = Termination(S.CANCELLED, R.CLIENT_DISCONNECTED)


def facts(termination: Any = None, *, draft: Any = True, **known: Any) -> Any:
    return ReleaseFacts(termination, draft, **known)


def concluded(**known: Any) -> Any:
    return facts(has_conclusion=True, verified_facts=1, **known)


@pytest.mark.parametrize(
    ("known", "outcome", "kind"),
    [
        pytest.param(
            concluded(evidence_valid=True, verdict=V.SUPPORTED), O.SUCCESS, None, id="lifecycle-10-1"
        ),
        pytest.param(facts(missing_info=1), O.FALLBACK, F.MISSING_REQUIRED_CONTEXT, id="lifecycle-10-2"),
        pytest.param(facts(verified_facts=1), O.FALLBACK, F.INSUFFICIENT_EVIDENCE, id="lifecycle-10-3"),
        pytest.param(
            facts(draft=False, verified_facts=1),
            O.FALLBACK,
            F.INSUFFICIENT_EVIDENCE,
            id="lifecycle-10-4-and-5",
        ),
        pytest.param(
            concluded(evidence_valid=False, repaired=True, recheck_valid=False),
            O.FALLBACK,
            F.EVIDENCE_VALIDATION_FAILED,
            id="lifecycle-10-6",
        ),
        pytest.param(
            concluded(evidence_valid=False, repaired=False),
            O.FALLBACK,
            F.EVIDENCE_VALIDATION_FAILED,
            id="lifecycle-10-6-no-repair",
        ),
        pytest.param(
            concluded(evidence_valid=True, verdict=V.UNSUPPORTED),
            O.FALLBACK,
            F.SEMANTIC_UNSUPPORTED,
            id="lifecycle-10-7",
        ),
        pytest.param(
            concluded(evidence_valid=True, verdict=V.UNAVAILABLE),
            O.FALLBACK,
            F.SEMANTIC_UNAVAILABLE,
            id="lifecycle-10-8",
        ),
        pytest.param(
            facts(BUDGET, draft=False, verified_facts=1),
            O.FALLBACK,
            F.INSUFFICIENT_EVIDENCE,
            id="lifecycle-10-9",
        ),
        pytest.param(facts(TIMED_OUT, verified_facts=9), O.FAILED, None, id="lifecycle-10-10"),
        pytest.param(facts(BUDGET, draft=False), O.FAILED, None, id="lifecycle-10-11"),
        pytest.param(facts(BROKEN, verified_facts=9), O.FAILED, None, id="lifecycle-10-12"),
        pytest.param(facts(GONE, verified_facts=9), O.CANCELLED, None, id="lifecycle-10-13"),
        pytest.param(facts(), O.FAILED, None, id="lifecycle-9-neither"),
        pytest.param(facts(draft=False), O.FAILED, None, id="lifecycle-9-no-facts"),
        pytest.param(
            concluded(evidence_valid=False, repaired=True, recheck_valid=True, verdict=V.SUPPORTED),
            O.SUCCESS,
            None,
            id="lifecycle-9-repaired",
        ),
        pytest.param(
            facts(verified_facts=1, missing_info=1),
            O.FALLBACK,
            F.INSUFFICIENT_EVIDENCE,
            id="lifecycle-9-progress-first",
        ),
    ],
)
def test_decisions(known: Any, outcome: Any, kind: Any) -> None:
    decision = next_step(known)
    assert isinstance(decision, ReleaseDecision)
    assert (decision.outcome, decision.fallback_type) == (outcome, kind)


@pytest.mark.parametrize(
    ("known", "step"),
    [
        pytest.param(concluded(), ReleaseStep.EVIDENCE_GUARD, id="lifecycle-9-initial"),
        pytest.param(concluded(evidence_valid=False), ReleaseStep.EVIDENCE_REPAIR, id="lifecycle-9-repair"),
        pytest.param(
            concluded(evidence_valid=False, repaired=True),
            ReleaseStep.EVIDENCE_RECHECK,
            id="lifecycle-9-recheck",
        ),
        pytest.param(concluded(evidence_valid=True), ReleaseStep.SEMANTIC_GUARD, id="lifecycle-9-semantic"),
        pytest.param(
            concluded(evidence_valid=False, repaired=True, recheck_valid=True),
            ReleaseStep.SEMANTIC_GUARD,
            id="lifecycle-9-semantic-after-repair",
        ),
    ],
)
def test_steps(known: Any, step: Any) -> None:
    assert next_step(known) is step


def every_fact() -> Any:
    for draft, conclusion, valid, repaired, recheck, verdict in itertools.product(
        (True, False),
        (True, False),
        (None, True, False),
        (None, True, False),
        (None, True, False),
        (None, *V),
    ):
        for verified, missing in itertools.product((0, 1), (0, 1)):
            yield {
                "has_draft": draft,
                "has_conclusion": conclusion,
                "verified_facts": verified,
                "missing_info": missing,
                "evidence_valid": valid,
                "repaired": repaired,
                "recheck_valid": recheck,
                "verdict": verdict,
            }


def test_success_always_had_a_conclusion_valid_evidence_and_support() -> None:
    for known in every_fact():
        decision = next_step(ReleaseFacts(None, **known))
        if isinstance(decision, ReleaseDecision) and decision.outcome is O.SUCCESS:
            assert known["has_draft"]
            assert known["has_conclusion"]
            assert known["evidence_valid"] or known["recheck_valid"]
            assert known["verdict"] is V.SUPPORTED


@pytest.mark.parametrize("ended", [TIMED_OUT, BUDGET, BROKEN, GONE], ids=lambda ended: ended.state.value)
def test_an_ended_run_asks_no_model(ended: Any) -> None:
    for known in every_fact():
        decision = next_step(ReleaseFacts(ended, **known))
        assert isinstance(decision, ReleaseDecision)
        assert decision.outcome is not O.SUCCESS
        assert decision.reason is ended.reason
        if decision.outcome is O.FALLBACK:
            assert ended is BUDGET
            assert known["verified_facts"]


def test_no_result_is_an_invalid_draft() -> None:
    decision = next_step(facts(draft=False))
    assert isinstance(decision, ReleaseDecision)
    assert decision.reason is R.INVALID_DRAFT


@pytest.mark.parametrize(
    ("termination", "outcome", "row", "end"),
    [
        pytest.param(Termination(S.SUCCESS, R.COMPLETED), O.SUCCESS, "SUCCESS", "CONTENT_DONE", id="3.10-1"),
        pytest.param(Termination(S.SUCCESS, R.COMPLETED), O.FALLBACK, "SUCCESS", "CONTENT_DONE", id="3.10-2"),
        pytest.param(BUDGET, O.FALLBACK, "SUCCESS", "CONTENT_DONE", id="3.10-3"),
        pytest.param(BUDGET, O.FAILED, "FAILED", "FAILURE_DONE", id="3.10-4-budget"),
        pytest.param(TIMED_OUT, O.FAILED, "FAILED", "FAILURE_DONE", id="3.10-4-time"),
        pytest.param(BROKEN, O.FAILED, "FAILED", "FAILURE_DONE", id="3.10-4-failed"),
        pytest.param(
            Termination(S.CANCELLED, R.USER_REQUESTED),
            O.CANCELLED,
            "CANCELLED",
            "STATUS_CANCELLED",
            id="3.10-5",
        ),
        pytest.param(GONE, O.CANCELLED, "CANCELLED", "NONE", id="3.10-6"),
    ],
)
def test_endings(termination: Any, outcome: Any, row: Any, end: Any) -> None:
    ending = ending_of(termination, outcome)
    assert (ending.row_status, ending.stream_end) == (RunRowStatus(row), StreamEnd(end))


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("outcome", O)
def test_only_endings_that_can_be(state: Any, outcome: Any) -> None:
    termination = Termination(state, R.COMPLETED)
    if (state, outcome) in ENDINGS:
        assert ending_of(termination, outcome).row_status is ROW_STATUS[outcome]
    else:
        with pytest.raises(ValueError, match="cannot release"):
            ending_of(termination, outcome)


@pytest.mark.parametrize(
    ("outcome", "row"),
    [
        pytest.param(O.SUCCESS, "SUCCESS", id="lifecycle-12.2-1"),
        pytest.param(O.FALLBACK, "SUCCESS", id="lifecycle-12.2-2"),
        pytest.param(O.FAILED, "FAILED", id="lifecycle-12.2-3"),
        pytest.param(O.CANCELLED, "CANCELLED", id="lifecycle-12.2-4"),
    ],
)
def test_row_status(outcome: Any, row: Any) -> None:
    assert ROW_STATUS[outcome] == row


@pytest.mark.parametrize(
    ("state", "outcome", "task", "touched", "status"),
    [
        pytest.param(S.SUCCESS, O.SUCCESS, TaskStatus.SUCCEEDED, True, "DONE", id="state-3.4-1"),
        pytest.param(S.SUCCESS, O.SUCCESS, None, True, "DONE", id="state-3.4-1-no-task"),
        pytest.param(S.SUCCESS, O.SUCCESS, TaskStatus.SUSPENDED, True, "WAITING", id="state-3.4-2"),
        pytest.param(S.SUCCESS, O.FALLBACK, TaskStatus.FAILED, True, "FAILED", id="state-3.4-3"),
        pytest.param(S.SUCCESS, O.SUCCESS, TaskStatus.RUNNING, True, "FAILED", id="state-3.4-3-running"),
        pytest.param(S.SUCCESS, O.SUCCESS, TaskStatus.CANCELED, True, "CANCELLED", id="state-3.4-4"),
        pytest.param(S.SUCCESS, O.FALLBACK, TaskStatus.SUCCEEDED, True, "DONE", id="3.10-2"),
        pytest.param(S.SUCCESS, O.SUCCESS, TaskStatus.RUNNING, False, "DONE", id="reply-beside-a-task"),
        pytest.param(
            S.SUCCESS, O.SUCCESS, TaskStatus.SUSPENDED, False, "WAITING", id="reply-beside-a-question"
        ),
        pytest.param(S.BUDGET_EXHAUSTED, O.FALLBACK, TaskStatus.FAILED, True, "FAILED", id="3.10-3"),
        pytest.param(
            S.BUDGET_EXHAUSTED, O.FALLBACK, TaskStatus.SUSPENDED, True, "WAITING", id="3.10-3-waiting"
        ),
        pytest.param(S.TIMED_OUT, O.FAILED, TaskStatus.FAILED, True, "FAILED", id="3.10-4"),
        pytest.param(S.FAILED, O.FAILED, None, True, "FAILED", id="3.10-4-no-task"),
        pytest.param(S.CANCELLED, O.CANCELLED, TaskStatus.RUNNING, True, "CANCELLED", id="3.10-5"),
    ],
)
def test_turn_status(state: Any, outcome: Any, task: Any, touched: Any, status: Any) -> None:
    assert turn_status(state, outcome, task, task_touched=touched) is TurnStatus(status)


def test_every_reason_to_end_has_its_public_reason() -> None:
    assert set(FAILURE_REASONS) == set(R)
    assert set(FAILURE_REASONS.values()) - {None} == set(FailureReason)
    assert [reason for reason, public in FAILURE_REASONS.items() if public is None] == [
        R.COMPLETED,
        R.CLIENT_DISCONNECTED,
        R.USER_REQUESTED,
    ]

"""GoalGate: a finish with a conclusion needs its target."""

from typing import Any

import pytest

from harness_service.core.goal_gate import Target, judge_finish, target_of
from turnfence.axes import CallStatus, SideEffect
from turnfence.records import EvidenceHead, TaskNode

C = CallStatus
NODE = TaskNode("n", target="ops.write")


def call(
    tool: Any = "ops.write",
    status: Any = C.SUCCESS,
    ok: Any = True,
    effect: Any = SideEffect.WRITE,
    started_at: Any = 1,
) -> Any:
    return EvidenceHead(
        "e" + str(started_at), "t", "n", tool, effect, status, business_ok=ok, started_at=started_at
    )


@pytest.mark.parametrize(
    ("calls", "accepted"),
    [
        ([call()], True),
        ([], False),
        ([call(ok=False)], False),
        ([call(status=C.FAILED)], False),
        ([call(tool="ops.other")], False),
        ([call(effect=SideEffect.NONE)], True),
        ([call(), call(status=C.UNKNOWN, ok=None, started_at=2)], False),
        ([call(), call(tool="ops.other", status=C.STARTED, ok=None, started_at=2)], False),
        ([call(), call(tool="ops.read", status=C.UNKNOWN, effect=SideEffect.NONE, started_at=2)], True),
        ([call(status=C.FAILED), call(started_at=2)], True),
    ],
)
def test_a_conclusion_needs_the_target(calls: Any, accepted: Any) -> None:
    verdict = judge_finish(NODE, "", calls, has_conclusion=True)
    assert verdict.accepted is accepted
    assert bool(verdict.reason and verdict.next_step) is not accepted


@pytest.mark.parametrize("calls", [[], [call(status=C.UNKNOWN)]])
def test_without_a_conclusion_it_always_passes(calls: Any) -> None:
    assert judge_finish(NODE, "", calls, has_conclusion=False).accepted


def test_without_a_target_it_passes() -> None:
    assert judge_finish(TaskNode("n"), "", [], has_conclusion=True).accepted


def test_where_the_target_comes_from() -> None:
    calls = [call(tool="late", started_at=9), call(tool="first", started_at=2)]
    assert target_of(TaskNode("n", target="plan"), "skill", calls) == Target("plan")
    assert target_of(TaskNode("n"), "skill", calls) == Target("skill")
    assert target_of(TaskNode("n"), "", calls) == Target("first", claimed=True)
    assert target_of(TaskNode("n", target="x", target_claimed=True), "", []) == Target("x", claimed=True)
    assert target_of(TaskNode("n"), "", [call(effect=SideEffect.NONE)]) == Target()


def test_a_claimed_target_counts_too() -> None:
    failed = [call(status=C.FAILED)]
    verdict = judge_finish(TaskNode("n"), "", failed, has_conclusion=True)
    assert not verdict.accepted
    assert verdict.target.claimed

"""Each row of the release table that one node reaches, as its caller sees it and as the record keeps it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.model_server import Fault, Reply
from tests.pair.caller import Heard
from tests.pair.rig import Rig, concludes, finish, read_fact, report
from turnfence import records as r
from turnfence.axes import (
    Durability,
    FailureReason,
    FallbackType,
    ReleaseOutcome,
    RunState,
    SemanticVerdict,
    StopReason,
    StreamState,
    TerminationReason,
    TurnStatus,
)

CITED = "load is 42 percent"
INVENTED = "load is 97 percent"  # its evidence says 42


def repaired(fact: str) -> Reply:
    """The model's second try at a draft whose evidence did not hold."""

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        return {
            "conclusion": "The load is 42 percent.",
            "facts": [{"text": fact, "evidence_ids": [cited_in(body)]}],
            "missing_info": [],
            "recommendations": [],
        }

    return reply


def cited_in(body: dict[str, Any]) -> str:
    """The evidence id that a repair request names."""
    found = re.search(r"[0-9a-f]{32}", str(body["messages"]))
    assert found is not None
    return found.group()


@dataclass(frozen=True)
class Row:
    """What the model says, and what must become of it. ``fallback``/``failure`` None: there is none."""

    name: str
    steps: tuple[Reply, ...]
    release: ReleaseOutcome
    fallback: FallbackType | None = None
    failure: FailureReason | None = None
    run_state: RunState = RunState.SUCCESS
    termination: TerminationReason | None = TerminationReason.COMPLETED
    stop: StopReason | None = None
    verdict: SemanticVerdict | None = None
    repair: tuple[Reply, ...] = ()
    judge: tuple[Reply, ...] = ()
    budget: dict[str, Any] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    status: TurnStatus = TurnStatus.DONE


def only_finish(**given: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda body: [finish(body, **given)]


def reported(gain: str = "GAINED", **given: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda body: [report(body, CITED, gain), finish(body, **given)]


ROWS = (
    Row(
        "supported",
        (read_fact(), concludes()),
        ReleaseOutcome.SUCCESS,
        verdict=SemanticVerdict.SUPPORTED,
        facts=(CITED,),
    ),
    Row(
        "repaired",
        (read_fact(), concludes(fact=INVENTED)),
        ReleaseOutcome.SUCCESS,
        repair=(repaired(CITED),),
        verdict=SemanticVerdict.SUPPORTED,
        facts=(CITED,),
    ),
    Row(
        "repair_in_vain",
        (read_fact(), concludes(fact=INVENTED)),
        ReleaseOutcome.FALLBACK,
        FallbackType.EVIDENCE_VALIDATION_FAILED,
        repair=(repaired(INVENTED),),
    ),
    Row(
        "repair_failed",
        (read_fact(), concludes(fact=INVENTED)),
        ReleaseOutcome.FALLBACK,
        FallbackType.EVIDENCE_VALIDATION_FAILED,
        repair=(Fault(status=500),),
    ),
    Row(
        "unsupported",
        (read_fact(), concludes()),
        ReleaseOutcome.FALLBACK,
        FallbackType.SEMANTIC_UNSUPPORTED,
        judge=({"verdict": "UNSUPPORTED", "reason": "no"},),
        verdict=SemanticVerdict.UNSUPPORTED,
        facts=(CITED,),
    ),
    Row(
        "judge_unavailable",
        (read_fact(), concludes()),
        ReleaseOutcome.FALLBACK,
        FallbackType.SEMANTIC_UNAVAILABLE,
        judge=(Fault(status=500),),
        verdict=SemanticVerdict.UNAVAILABLE,
        facts=(CITED,),
    ),
    Row(
        "missing_context",
        (read_fact(), only_finish(missing=("which host it is",))),
        ReleaseOutcome.FALLBACK,
        FallbackType.MISSING_REQUIRED_CONTEXT,
    ),
    Row(
        "insufficient",
        (read_fact(), reported(fact=CITED, missing=("the other half",))),
        ReleaseOutcome.FALLBACK,
        FallbackType.INSUFFICIENT_EVIDENCE,
        facts=(CITED,),
    ),
    Row(
        "saturated",
        (
            read_fact("a"),
            lambda body: [report(body, CITED), ("sim__read_fact", {"name": "b"})],
            lambda body: [report(body, CITED, "NO_GAIN"), ("sim__read_fact", {"name": "c"})],
            lambda body: [report(body, CITED, "NO_GAIN"), ("sim__read_fact", {"name": "d"})],
            lambda body: [report(body, CITED, "NO_GAIN"), ("sim__read_fact", {"name": "e"})],
        ),
        ReleaseOutcome.FALLBACK,
        FallbackType.INSUFFICIENT_EVIDENCE,
        stop=StopReason.INFORMATION_SATURATED,
        facts=(CITED,),
    ),
    Row(
        "protocol_stop",
        (
            read_fact("a"),
            lambda body: [report(body, CITED), ("sim__read_fact", {"name": "b"})],
            read_fact("c"),  # the last evidence was not rated: refused, and again, and again
            read_fact("d"),
            read_fact("e"),
        ),
        ReleaseOutcome.FALLBACK,
        FallbackType.INSUFFICIENT_EVIDENCE,
        stop=StopReason.PROGRESS_PROTOCOL_VIOLATED,
        facts=(CITED,),
    ),
    Row(
        "budget_with_facts",
        (read_fact(), lambda body: [report(body, CITED), ("sim__read_fact", {"name": "other"})]),
        ReleaseOutcome.FALLBACK,
        FallbackType.INSUFFICIENT_EVIDENCE,
        run_state=RunState.BUDGET_EXHAUSTED,
        termination=TerminationReason.BUDGET_EXHAUSTED,
        stop=StopReason.BUDGET_LIMIT_REACHED,
        budget={"tool_calls": 1},
        facts=(CITED,),
        status=TurnStatus.FAILED,
    ),
    Row(
        "budget_without_facts",
        (read_fact(), read_fact("other")),
        ReleaseOutcome.FAILED,
        failure=FailureReason.BUDGET_EXHAUSTED,
        run_state=RunState.BUDGET_EXHAUSTED,
        termination=TerminationReason.BUDGET_EXHAUSTED,
        stop=StopReason.BUDGET_LIMIT_REACHED,
        budget={"model_calls": 2},
    ),
    Row(
        "timed_out",
        (Fault(hang=True),),
        ReleaseOutcome.FAILED,
        failure=FailureReason.TIMED_OUT,
        run_state=RunState.TIMED_OUT,
        termination=TerminationReason.DEADLINE_EXCEEDED,
        budget={"deadline": {"seconds": 1}},
    ),
    Row(
        "invalid_draft",
        ([("builtin_finish", "{")],),
        ReleaseOutcome.FAILED,
        failure=FailureReason.INVALID_DRAFT,
        run_state=RunState.FAILED,
        termination=TerminationReason.INVALID_DRAFT,
    ),
    Row(
        "model_failed",
        (Fault(status=500),),
        ReleaseOutcome.FAILED,
        failure=FailureReason.MODEL_FAILED,
        run_state=RunState.FAILED,
        termination=TerminationReason.MODEL_FAILED,
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_a_row_of_the_release_table(rig: Rig, row: Row) -> None:
    rig.task_turn("reader", *row.steps)
    if row.repair:
        rig.says("evidence_repair", *row.repair)
    if row.judge:
        rig.says("semantic_verdict", *row.judge)
    talk = rig.talk()
    heard = await talk.say(budget=row.budget)
    assert heard.release is row.release
    _shown(heard, row)
    run = await talk.get_run(heard.run_id)
    assert run.run_state is row.run_state
    assert run.release_outcome is row.release
    assert run.fallback_type is row.fallback
    assert run.termination_reason is row.termination
    assert run.semantic_verdict is row.verdict
    assert run.stop_reason is row.stop
    assert run.stream_state is StreamState.TERMINAL
    assert run.durability is Durability.PERSISTED
    assert run.usage == heard.done.usage


def _shown(heard: Heard, row: Row) -> None:
    """Exactly one of content and failure, then done."""
    assert heard.kinds[0] == "metadata"
    assert len(heard.of(r.Content)) + len(heard.of(r.Failure)) == 1
    if row.failure is not None:
        assert heard.failure is row.failure
        assert heard.status is TurnStatus.FAILED
        return
    assert heard.status is row.status
    if row.fallback is None:
        assert [fact.text for fact in heard.report.facts] == list(row.facts)
        assert all(fact.evidence_ids for fact in heard.report.facts)
        return
    body = heard.content.body
    assert isinstance(body, r.Fallback)
    assert body.type is row.fallback
    assert [fact.text for fact in body.verified_facts] == list(row.facts)
    assert "97" not in heard.content.text
